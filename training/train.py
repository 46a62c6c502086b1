"""Train a bundled model: `python -m training.train --model llava`, `qwen` or `fine`.

Every random choice depends on the seed, the stage and the step alone, so that a run that was
stopped goes on as if it had not been.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.quality.fine import FINE
from training import fine
from training.families import FAMILIES
from training.pool import load_pool
from training.stages import STAGES, Stage
from training.trainer import Trainer

RUNS = Path(__file__).parent / "runs"
_SCENES, _FINE_SCENES = 40_000, 8_000
_CHECKPOINT_EVERY = 100
_WARMUP = 60  # steps
# glibc hands every large tensor back to the system and faults its pages in again: 3 x slower.
# Threads that wait asleep leave the processor to whatever else runs beside a long training.
_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


def run_folder(name: str) -> Path:
    """Return where the training of a model keeps checkpoints and data if nothing else is said."""
    return RUNS / name


def train(name: str, folder: Path, num_scenes: int, seed: int, until: str) -> Trainer:
    """Run the stages up to and including `until`, going on from the last checkpoint."""
    if name == FINE:
        trainer, stages = fine.prepare(folder, num_scenes, seed), fine.STAGES
    else:
        trainer = Trainer(name, load_pool(folder, num_scenes, FAMILIES[name].canvas), seed)
        steps = trainer.family.steps
        stages = tuple(replace(s, steps=steps.get(s.name, s.steps)) for s in STAGES)
    for stage in stages:
        _run_stage(trainer, stage, folder / f"{stage.name}.pt")
        if stage.name == until:
            break
    return trainer


def _run_stage(trainer: Trainer, stage: Stage, path: Path) -> None:
    optimizer = trainer.optimizer(stage)
    first = 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        trainer.model.load_state_dict(saved["model"])
        trainer.symbols.load_state_dict(saved["symbols"])
        first = saved["step"]
        if first < stage.steps:
            optimizer.load_state_dict(saved["optimizer"])
    if first >= stage.steps:
        return
    smooth: dict[str, float] = {}
    bar = tqdm(range(first, stage.steps), initial=first, total=stage.steps, desc=stage.name)
    for step in bar:
        scale = min(1.0, (step + 1) / _WARMUP)
        if stage.cooldown:
            scale = min(scale, 0.02 + (1 - step / stage.steps) / stage.cooldown)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * scale
        with torch.autocast("cpu", torch.bfloat16, enabled=trainer.family.mixed_precision):
            loss, shown = trainer.loss(stage, step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        for name, value in {"loss": loss.item(), **shown}.items():
            smooth[name] = 0.95 * smooth.get(name, value) + 0.05 * value
        bar.set_postfix({name: f"{value:.3f}" for name, value in smooth.items()})
        if (step + 1) % _CHECKPOINT_EVERY == 0 or step + 1 == stage.steps:
            state = {
                "model": trainer.model.state_dict(),
                "symbols": trainer.symbols.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step + 1,
            }
            temporary = path.with_suffix(".tmp")
            torch.save(state, temporary)
            temporary.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=list(FAMILIES), default="llava")
    parser.add_argument("--runs", type=Path, help="where checkpoints and data go")
    parser.add_argument(
        "--scenes", type=int, help=f"training pictures (default: {_SCENES}, {FINE}: {_FINE_SCENES})"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    names = [stage.name for stage in STAGES]
    parser.add_argument("--until", choices=names, default=names[-1], help="last stage to run")
    arguments = parser.parse_args()
    if not os.environ.keys() >= _ENVIRONMENT.keys():
        # Read at start only.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | _ENVIRONMENT)
    torch.set_num_threads(arguments.threads)
    folder = arguments.runs or run_folder(arguments.model)
    usual = _FINE_SCENES if arguments.model == FINE else _SCENES
    train(arguments.model, folder, arguments.scenes or usual, arguments.seed, arguments.until)


if __name__ == "__main__":
    main()

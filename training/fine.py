"""Where `python -m training.train --model fine` starts: the saved weights of the Qwen-style model.

What training alone uses is not saved with them, so it is first learnt again from what the tower
says.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tqdm import trange

from benchmarks.quality.fine import FINE
from benchmarks.shared.provenance import ROOT
from training.families import FAMILIES, Family
from training.packing import choose_glimpse, sample_arrays
from training.pool import load_pool
from training.stages import Stage
from training.symbols import spelling_loss
from training.trainer import Trainer

STAGES: tuple[Stage, ...] = (
    Stage("grid", 120, 16, 8, language_rate=6e-4),
    Stage("glimpses", 300, 16, 6, language_rate=5e-4, vision_rate=1e-3),
    Stage("pictures", 375, 12, 6, language_rate=4e-4, vision_rate=6e-4, cooldown=0.7),
    Stage("gaps", 150, 16, 8, language_rate=4e-4, cooldown=0.8),
)
_RECALL = Stage("grid", 100, 16, 4)
_USUAL_FORM = (12, 12)
START = ROOT / "models" / "scenes-qwen" / "model.safetensors"


def load_weights(family: Family, model: Any, path: Path) -> None:
    """Load an exported model's weights."""
    saved = load_file(path)
    names = {name: family.published_name(name) for name in model.state_dict()}
    model.load_state_dict({name: saved[published].float() for name, published in names.items()})


def recall_symbols(trainer: Trainer) -> None:
    """Learn the symbols that the saved tower tells, with all of the model at rest."""
    pool, family = trainer.pool, trainer.family
    assert pool.forms is not None
    usual = (pool.forms == _USUAL_FORM).all(1) & (pool.sharpness == 4)
    among = np.flatnonzero(usual)
    trainer.model.requires_grad_(False)
    optimizer = torch.optim.Adam(trainer.symbols.parameters(), lr=1e-2)
    patches = torch.arange(math.prod(_USUAL_FORM)).expand(_RECALL.batch, -1)
    bar = trange(_RECALL.steps, desc="recall")
    for step in bar:
        rng = np.random.default_rng([trainer.seed, 99, step])
        generator = torch.Generator().manual_seed(step)
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / _RECALL.steps)
        scenes = rng.choice(among, size=_RECALL.batch)
        batch = sample_arrays(pool, scenes)
        owner = batch["owner"][:, : patches.shape[1]]
        seen = choose_glimpse(owner, 60, generator)
        batch["owner"] = owner.gather(1, seen)
        offsets = family.offsets(batch["centers"], seen, _USUAL_FORM)
        assert offsets is not None
        mine = batch["owner"].clamp(min=0)[:, :, None, None].expand(-1, -1, -1, 2)
        batch["offsets"] = offsets.gather(2, mine).squeeze(2)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            told = family.encode(trainer.model, pool.pixels[scenes], seen, _USUAL_FORM, False)
        error = (trainer.symbols.visual_tokens(batch) - told.tokens.float()).square().sum(-1)
        clear = batch["owner"] >= -1
        columns = (seen % _USUAL_FORM[1] + 0.5) / _USUAL_FORM[1]
        spelled = told.states[family.spelling_layer].float()
        loss = error[clear].mean() + spelling_loss(trainer.symbols, spelled, columns, batch)
        positions = family.positions(seen, _USUAL_FORM)
        answer, shown = trainer.answer_loss(
            told.tokens.float(), *positions, scenes, batch, _RECALL, rng
        )
        optimizer.zero_grad(set_to_none=True)
        (loss + answer).backward()
        optimizer.step()
        size = told.tokens[clear].float().square().sum(-1).mean()
        shown |= {"error": error[clear].mean().item(), "size": size.item()}
        bar.set_postfix({name: f"{value:.3f}" for name, value in shown.items()})


def prepare(folder: Path, num_scenes: int, seed: int) -> Trainer:
    """Return a trainer whose model has the saved weights, and symbols that fit them."""
    family = FAMILIES[FINE]
    trainer = Trainer(FINE, load_pool(folder, num_scenes, family.canvas, FINE), seed)
    load_weights(family, trainer.model, START)
    recalled = folder / "recalled.pt"
    if recalled.exists():
        trainer.symbols.load_state_dict(torch.load(recalled, weights_only=True))
    else:
        recall_symbols(trainer)
        torch.save(trainer.symbols.state_dict(), recalled)
    return trainer

"""Ablate: the paper's ablations in this process, where the variants of the method can be had."""

import argparse
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.quality.cases import SPLITS, UNPRUNED, SceneId, scene_ids
from benchmarks.quality.drawing import draw_scene
from benchmarks.quality.inference import Row, SceneModel, Seen, load_model
from benchmarks.quality.questions import Question
from benchmarks.quality.record import provenance
from benchmarks.quality.results import UNPRUNED_NAME, Mark, report, write
from benchmarks.quality.variants import OURS, Variant, ablations
from benchmarks.shared.provenance import RESULTS, ROOT
from msdg_vllm.core import analyze_image, num_kept_tokens, score_tokens, take_tokens

_SCENES_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Trial:
    """A question, and what one setting keeps of the picture for it."""

    question: Question
    name: str
    retention: Fraction
    kept: Tensor  # (B,)


def select(
    model: SceneModel,
    seen: Seen,
    questions: list[Question],
    variant: Variant,
    retentions: Iterable[Fraction],
    random_seed: int = 0,
) -> dict[Fraction, Tensor]:
    """Return what a variant keeps for each question, `(Q, B)`, at each retention."""
    options = replace(variant.options, random_seed=random_seed)
    signals = analyze_image(
        {layer: seen.states[layer] for layer in options.layers(variant.profile)},
        variant.profile,
        model.patches_per_token,
        saliency=seen.attention if options.saliency == "given" else None,
        options=options,
    )
    each = signals.map(lambda tensor: tensor.expand(len(questions), *tensor.shape))
    visual = seen.visual.expand(len(questions), -1, -1)
    scores = score_tokens(each, visual, _queries(model, questions))
    num_tokens = len(seen.visual)
    return {
        retention: take_tokens(each, scores, num_kept_tokens(num_tokens, float(retention)), options)
        for retention in retentions
    }


def _queries(model: SceneModel, questions: list[Question]) -> Tensor:
    """Queries in one tensor, `(Q, T, D)`; one that is short repeats its last token."""
    queries = [model.embed(question.text) for question in questions]
    longest = max(len(query) for query in queries)
    return torch.stack(
        [torch.cat([query, query[-1:].expand(longest - len(query), -1)]) for query in queries]
    )


def trials(
    model: SceneModel,
    scene: SceneId,
    seen: Seen,
    settings: dict[str, tuple[Variant, set[Fraction]]],
) -> Iterator[Trial]:
    """Yield every question about a scene, unpruned and in every setting."""
    questions = scene.questions()
    everything = torch.arange(len(seen.visual))
    for question in questions:
        yield Trial(question, UNPRUNED_NAME, UNPRUNED, everything)
    for name, (variant, retentions) in settings.items():
        # Every scene draws its own tokens where a variant leaves the choice to chance.
        seed = scene.scene().seed % (1 << 31)
        kept = select(model, seen, questions, variant, retentions, seed)
        for retention, indices in kept.items():
            for question, row in zip(questions, indices, strict=True):
                yield Trial(question, name, retention, row)


def mark(model: SceneModel, scene: SceneId, seen: Seen, asked: list[Trial]) -> list[Mark]:
    """Answer trials about one picture; those that keep the same tokens are answered once."""
    keys = [(t.question.kind, tuple(t.kept.tolist())) for t in asked]
    unique = dict(zip(keys, asked, strict=True))
    rows = [Row(seen, trial.kept, trial.question) for trial in unique.values()]
    right = dict(zip(unique, model.right(rows), strict=True))
    return [
        Mark(scene, trial.question.kind, trial.name, trial.retention, right[key])
        for key, trial in zip(keys, asked, strict=True)
    ]


@torch.inference_mode()
def run_trials(
    model: SceneModel,
    scenes: list[SceneId],
    settings: dict[str, tuple[Variant, set[Fraction]]],
) -> list[Mark]:
    """Return a mark for every question in every setting; each scene is encoded once."""
    marks: list[Mark] = []
    with tqdm(total=len(scenes), unit=" scenes") as bar:
        for first in range(0, len(scenes), _SCENES_AT_ONCE):
            part = scenes[first : first + _SCENES_AT_ONCE]
            pictures = [draw_scene(scene.scene()) for scene in part]
            for scene, seen in zip(part, model.see(pictures), strict=True):
                marks += mark(model, scene, seen, list(trials(model, scene, seen, settings)))
                bar.update()
    return marks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=Path,
        default=ROOT / "models" / "scenes-llava",
        metavar="FOLDER",
        help="default: models/scenes-llava",
    )
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=["test"])
    parser.add_argument("--seeds", type=int, default=3, help="seeds of scenes (default: 3)")
    parser.add_argument(
        "--scenes", type=int, default=100, help="of each seed and split (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    parser.add_argument(
        "--output", type=Path, help="default: benchmarks/results/ablations-MODEL.json"
    )


def main(arguments: argparse.Namespace) -> Path:
    """Run all ablations, and return where the results were written."""
    torch.set_num_threads(arguments.threads)
    model = load_model(arguments.model)
    chosen = ablations(model.profile, model.num_layers)
    settings: dict[str, tuple[Variant, set[Fraction]]] = {}
    for ablation in chosen:
        for variant in ablation.variants:
            known = settings.setdefault(variant.name, (variant, set()))
            known[1].update(ablation.retentions)
    scenes = scene_ids(arguments.splits, arguments.seeds, arguments.scenes)
    start = time.perf_counter()
    marks = run_trials(model, scenes, settings)
    facts = {
        **provenance(arguments.model),
        "dtype": "float32",
        "scenes": {
            "splits": arguments.splits,
            "seeds": arguments.seeds,
            "per_seed": arguments.scenes,
        },
        "asked": {"questions": len(marks), "seconds": round(time.perf_counter() - start, 1)},
        "encoder": {"layers": model.num_layers, "profile": asdict(model.profile)},
    }
    output: Path = arguments.output or RESULTS / f"ablations-{arguments.model.resolve().name}.json"
    write(report(facts, marks, [a.table() for a in chosen], OURS), output)
    return output

"""Evaluate a model on fine scenes without a server: `python -m training.evaluate_fine`.

Accuracy per kind of question and per size of picture, unpruned, pruned, and with the picture scaled
down to as many tokens.
"""

import argparse
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from PIL import Image as Pictures
from tqdm import tqdm

from benchmarks.quality.ablate import select
from benchmarks.quality.drawing import draw_scene
from benchmarks.quality.fine import TOKEN_SIDE, sample_fine
from benchmarks.quality.inference import Row, SceneModel, Seen, load_model
from benchmarks.quality.questions import FINE_KINDS, Question, ask
from benchmarks.quality.scenes import Scene, sample_scene
from benchmarks.quality.variants import OURS, Variant
from msdg_vllm.core import num_kept_tokens
from msdg_vllm.methods import Encoder, Image, Signals, method_named
from msdg_vllm.methods.resize import scaled_grid
from training.export import MODELS
from training.families import FAMILIES
from training.pool import at_usual_size

RETENTIONS = (Fraction(1, 9), Fraction(1, 18))
_UNPRUNED = "unpruned"
_RESIZE = "resize"


@dataclass(frozen=True, slots=True)
class Case:
    group: str
    picture: Pictures.Image
    questions: list[Question]


def cases(kind: str, number: int) -> Iterator[Case]:
    """Yield `number` scenes of a kind, in groups by size: `fine`, `half`, or a usual split."""
    for index in range(number):
        if kind in ("fine", "half"):
            scene = sample_fine(index)
            picture = draw_scene(scene)
            if kind == "half":
                half = scene.width // 2, scene.height // 2
                picture = picture.resize(half, Pictures.Resampling.BICUBIC)
            group = f"{scene.width * scene.height // TOKEN_SIDE**2} tokens"
        else:
            scene = sample_scene(index, kind)  # type: ignore[arg-type]
            picture = at_usual_size(draw_scene(scene))
            group = "square" if scene.width == scene.height else "other"
        yield Case(group, picture, _questions(scene))


def _questions(scene: Scene) -> list[Question]:
    rng = np.random.default_rng([scene.seed, 2, 0])
    asked = (ask(scene, kind, rng) for kind in FINE_KINDS)
    return [question for question in asked if question is not None]


def _kept(
    model: SceneModel, seen: Seen, question: Question, method: str, budget: int, seed: int
) -> torch.Tensor:
    encoder = Encoder(model.num_layers, model.profile, False, patches_per_token=4)
    query = model.embed(question.text).unique(dim=0)
    image = Image(Signals(), seen.visual, encoder, query, (seen.grid,), seed)
    return method_named(method).select(image, budget).indices


def rows_of(
    model: SceneModel, case: Case, methods: Iterable[str]
) -> Iterator[tuple[str, Fraction, Row]]:
    """Yield every question about a picture, unpruned and by every method."""
    seen = model.see([case.picture])[0]
    number = len(seen.visual)
    for question in case.questions:
        yield _UNPRUNED, Fraction(1), Row(seen, torch.arange(number), question)
    seed = int.from_bytes(hashlib.sha256(case.picture.tobytes()).digest()[:6])
    for method in methods:
        if method == "msdg":
            variant = Variant(OURS, OURS, model.profile)
            for retention, kept in select(model, seen, case.questions, variant, RETENTIONS).items():
                for question, mine in zip(case.questions, kept, strict=True):
                    yield method, retention, Row(seen, mine, question)
            continue
        for retention in RETENTIONS:
            budget = num_kept_tokens(number, float(retention))
            if method == _RESIZE:
                rows, columns = scaled_grid(*seen.grid, budget)
                size = columns * TOKEN_SIDE, rows * TOKEN_SIDE
                smaller = model.see([case.picture.resize(size, Pictures.Resampling.BICUBIC)])[0]
                everything = torch.arange(len(smaller.visual))
                for question in case.questions:
                    yield method, retention, Row(smaller, everything, question)
                continue
            for question in case.questions:
                mine = _kept(model, seen, question, method, budget, seed)
                yield method, retention, Row(seen, mine, question)


def free_resolution(model: SceneModel) -> None:
    """Let a model's processor take pictures of up to 24 x 24 tokens as they are."""
    images = FAMILIES["fine"].processor(model.tokenizer).image_processor
    images.size["shortest_edge"] = TOKEN_SIDE**2
    model.processor.image_processor = images


@torch.inference_mode()
def evaluate(
    model: SceneModel, asked: Iterable[Case], methods: list[str]
) -> dict[tuple[str, str, str, str], list[bool]]:
    """Return whether each answer was right, by method, retention, group and kind."""
    marks: dict[tuple[str, str, str, str], list[bool]] = defaultdict(list)
    for case in tqdm(list(asked), mininterval=10):
        rows = list(rows_of(model, case, methods))
        right = model.right([row for _, _, row in rows])
        for (method, retention, row), is_right in zip(rows, right, strict=True):
            marks[method, str(retention), case.group, row.question.kind].append(is_right)
    return dict(marks)


def table(marks: dict[tuple[str, str, str, str], list[bool]]) -> str:
    """Lay the marks out by method and retention, all groups together, then each by itself."""
    lines = ["| setting | scenes | " + " | ".join(FINE_KINDS) + " | mean |"]
    lines.append("|---|---|" + "---:|" * (len(FINE_KINDS) + 1))
    settings = list(dict.fromkeys((m, r) for m, r, _, _ in marks))
    groups = sorted({g for _, _, g, _ in marks})
    for method, retention in settings:
        for group in (None, *groups):
            cells, shares = [], []
            for kind in FINE_KINDS:
                right = [
                    one
                    for g in groups
                    if group in (None, g)
                    for one in marks.get((method, retention, g, kind), [])
                ]
                cells.append(f"{100 * np.mean(right):.0f} ({len(right)})" if right else "-")
                shares += [100 * np.mean(right)] if right else []
            label = "all" if group is None else group
            mean = f"{np.mean(shares):.1f}"
            lines.append(f"| {method} {retention} | {label} | {' | '.join(cells)} | {mean} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=MODELS / "scenes-qwen")
    parser.add_argument("--kinds", nargs="+", default=["fine", "test"], metavar="SCENES")
    parser.add_argument("--scenes", type=int, default=100)
    parser.add_argument("--methods", nargs="*", default=[])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = load_model(arguments.model)
    free_resolution(model)
    results = {}
    for kind in arguments.kinds:
        marks = evaluate(model, cases(kind, arguments.scenes), arguments.methods)
        print(f"## {arguments.model.name}: {kind}\n{table(marks)}\n", flush=True)
        results[kind] = {"/".join(key): right for key, right in marks.items()}
    if arguments.json:
        arguments.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()

"""Show: what methods keep of some pictures, and how far the encoder moves each patch by layer."""

import argparse
from fractions import Fraction
from pathlib import Path

import torch

from benchmarks.quality.asking import Endpoint
from benchmarks.quality.cases import SPLITS, SceneId, parse_retention
from benchmarks.quality.drawing import draw_scene
from benchmarks.quality.inference import load_model
from benchmarks.quality.panels import KeptPanel, KeptRow, UpdateMaps, kept_figure, update_figure
from benchmarks.quality.questions import Question
from benchmarks.quality.render import FIGURES
from benchmarks.quality.run import OURS, model_folder
from benchmarks.shared.pictures import data_url

# One kind a picture, those that need a certain place first.
_KINDS = ("reading", "attribute", "position", "counting", "presence", "choice")
_SHOWN = ("random", "visionzip", "divprune", "prunesid", OURS)


def question_about(scene: SceneId, kind: str) -> Question:
    """Return the scene's question of a kind, or its first one if it has none of that kind."""
    questions = scene.questions()
    return next((question for question in questions if question.kind == kind), questions[0])


def look(
    endpoint: Endpoint, scene: SceneId, kind: str, methods: list[str], retention: Fraction
) -> KeptRow:
    """Ask about one scene, unpruned and with every method, and fetch what was kept."""
    picture, question = draw_scene(scene.scene()), question_about(scene, kind)
    url = data_url(picture)
    whole = endpoint.ask(url, question.text, OURS)
    panels = []
    for method in methods:
        said = endpoint.ask(url, question.text, method, retention, explain=True)
        assert said.explanation is not None
        explained = endpoint.client.explanation(said.explanation)
        rows, columns = explained["grid"]
        panels.append(KeptPanel(method, said.text, (rows, columns), explained["kept"]))
    return KeptRow(picture, question, whole.text, tuple(panels))


@torch.inference_mode()
def update_maps(model_path: Path, scenes: list[SceneId]) -> list[UpdateMaps]:
    """Return how far each token moves in each layer, and over the saliency window."""
    model = load_model(model_path)
    pictures = [draw_scene(scene.scene()) for scene in scenes]
    window = model.profile.saliency_window
    assert window is not None, "bundled models are calibrated with a saliency window"
    maps = []
    for picture, seen in zip(pictures, model.see(pictures), strict=True):
        windows = [*((layer, layer + 1) for layer in range(model.num_layers)), window]
        moved = [
            (seen.states[last] - seen.states[first])
            .norm(dim=-1)
            .view(-1, model.patches_per_token)
            .mean(dim=-1)
            .view(seen.grid)
            .numpy()
            for first, last in windows
        ]
        maps.append(UpdateMaps(picture, moved[:-1], moved[-1], window))
    return maps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server", default="http://127.0.0.1:8000", metavar="URL", help="default: %(default)s"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help=f"default: those of {', '.join(_SHOWN)} that the server offers",
    )
    parser.add_argument(
        "--retention", type=parse_retention, default=Fraction(1, 9), help="default: 1/9"
    )
    parser.add_argument("--split", choices=SPLITS, default="test")
    parser.add_argument(
        "--scenes", nargs="+", type=int, default=[0, 1, 2, 3], help="numbers (default: 0 1 2 3)"
    )
    parser.add_argument(
        "--weights", type=Path, metavar="FOLDER", help="default: where the server has them from"
    )
    parser.add_argument(
        "--figures", type=Path, default=FIGURES, help="where to (default: docs/figures)"
    )


def main(arguments: argparse.Namespace) -> None:
    """Draw both figures for the same scenes."""
    endpoint = Endpoint(arguments.server)
    methods = arguments.methods or [name for name in _SHOWN if name in endpoint.methods]
    endpoint.check_methods(methods)
    folder = model_folder(endpoint, arguments.weights)
    scenes = [SceneId(arguments.split, 0, number) for number in arguments.scenes]
    rows = [
        look(endpoint, scene, _KINDS[place % len(_KINDS)], methods, arguments.retention)
        for place, scene in enumerate(scenes)
    ]
    name = folder.resolve().name
    arguments.figures.mkdir(parents=True, exist_ok=True)
    for figure, path in (
        (kept_figure(rows), arguments.figures / f"kept-{name}.png"),
        (update_figure(update_maps(folder, scenes)), arguments.figures / f"updates-{name}.png"),
    ):
        figure.savefig(path, dpi=110)
        print(f"drawn: {path}")

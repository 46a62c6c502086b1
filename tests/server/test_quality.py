"""The quality benchmark against real servers that serve the bundled models."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks.quality import show
from benchmarks.quality.ablate import mark, select, trials
from benchmarks.quality.asking import Endpoint
from benchmarks.quality.cases import SceneId, scene_ids
from benchmarks.quality.drawing import draw_scene
from benchmarks.quality.inference import SceneModel, load_model
from benchmarks.quality.questions import KINDS
from benchmarks.quality.record import weights_hash
from benchmarks.quality.variants import OURS, Variant
from benchmarks.shared.client import ServerError
from benchmarks.shared.pictures import data_url
from benchmarks.shared.provenance import ROOT
from examples import transformers_llava, transformers_qwen2_5_vl
from msdg_vllm.core.budget import num_kept_tokens
from tests.server.running import Server, running_server

NINTH = Fraction(1, 9)


@pytest.fixture(scope="module", params=["scenes-llava", "scenes-qwen", "scenes-fine"])
def model(request: pytest.FixtureRequest) -> SceneModel:
    return load_model(ROOT / "models" / request.param)


@pytest.fixture(scope="module")
def bundled(model: SceneModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("bundled") / "server.log"
    with running_server(model.folder, log) as running:
        yield running


def _run(bundled: Server, folder: Path) -> dict[str, Any]:
    command = [
        *(sys.executable, "-m", "benchmarks.quality", "run", "--server", bundled.url),
        *("--methods", "msdg", "--retentions", "1/9"),
        *("--scenes", "3", "--seeds", "2", "--splits", "test"),
        *("--answers", str(folder / "answers.jsonl"), "--output", str(folder / "results.json")),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


def test_a_run_scores_every_question_and_a_second_one_asks_nothing(
    bundled: Server, model: SceneModel, tmp_path: Path
) -> None:
    results = _run(bundled, tmp_path)
    scenes = scene_ids(["test"], 2, 3)
    sizes = [
        len(seen.visual)
        for scene in scenes
        for seen in model.see([draw_scene(scene.scene())]) * len(scene.questions())
    ]
    num_questions = len(sizes)
    assert [(e["name"], e["retention"], e["questions"]) for e in results["entries"]] == [
        ("unpruned", "1", num_questions),
        ("msdg", "1/9", num_questions),
    ]
    assert results["model"]["weights_sha256"] == weights_hash(model.folder)
    assert results["visual_tokens"] == {
        "1": sum(sizes) / num_questions,
        "1/9": sum(num_kept_tokens(size, 1 / 9) for size in sizes) / num_questions,
    }
    assert results["asked"]["questions"] == 2 * num_questions
    again = _run(bundled, tmp_path)
    assert again["asked"]["questions"] == 0
    assert again["entries"] == results["entries"]


def test_this_process_and_the_endpoint_keep_the_same_tokens_and_agree_on_the_answers(
    bundled: Server, model: SceneModel
) -> None:
    endpoint = Endpoint(bundled.url)
    ours = Variant(OURS, OURS, model.profile)
    scenes = [SceneId("held_out", 0, number) for number in range(4)]
    pictures = [draw_scene(scene.scene()) for scene in scenes]
    agreed = []
    for scene, picture, seen in zip(scenes, pictures, model.see(pictures), strict=True):
        questions = scene.questions()
        kept = select(model, seen, questions, ours, [NINTH])[NINTH]
        asked = list(trials(model, scene, seen, {OURS: (ours, {NINTH})}))
        marks = {(m.kind, m.name): m.right for m in mark(model, scene, seen, asked)}
        for question, indices in zip(questions, kept, strict=True):
            url = data_url(picture)
            said = endpoint.ask(url, question.text, "msdg", NINTH, explain=True)
            assert said.explanation is not None
            assert endpoint.client.explanation(said.explanation)["kept"] == indices.tolist()
            agreed.append((said.text == question.answer) == marks[question.kind, OURS])
            whole = endpoint.ask(url, question.text, "msdg")
            agreed.append((whole.text == question.answer) == marks[question.kind, "unpruned"])
    assert len(agreed) > 2 * len(KINDS)
    assert all(agreed)


def test_plain_transformers_keeps_the_tokens_of_the_server_and_answers_the_same(
    bundled: Server, model: SceneModel
) -> None:
    qwen = transformers_qwen2_5_vl
    example = {"scenes-llava": transformers_llava, "scenes-qwen": qwen, "scenes-fine": qwen}
    ask = example[model.folder.name].ask
    endpoint = Endpoint(bundled.url)
    for name, questions in json.loads((ROOT / "examples" / "questions.json").read_text()).items():
        picture = Image.open(ROOT / "examples" / name).convert("RGB")
        for question in questions:
            answer, keep = ask(
                model.model, model.processor, model.profile, picture, question, float(NINTH)
            )
            said = endpoint.ask(data_url(picture), question, "msdg", NINTH, explain=True)
            assert said.explanation is not None
            assert endpoint.client.explanation(said.explanation)["kept"] == keep.tolist()
            assert said.text.strip() == answer


def test_a_method_the_server_does_not_know_is_named(bundled: Server) -> None:
    with pytest.raises(ServerError, match="does not know fastv; it offers msdg"):
        Endpoint(bundled.url).check_methods(["fastv"])


def test_what_is_kept_and_how_the_encoder_moves_is_drawn(
    bundled: Server, model: SceneModel, tmp_path: Path
) -> None:
    parser = argparse.ArgumentParser()
    show.add_arguments(parser)
    show.main(
        parser.parse_args(["--server", bundled.url, "--scenes", "0", f"--figures={tmp_path}"])
    )
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"{what}-{model.folder.name}.png" for what in ("kept", "updates")]

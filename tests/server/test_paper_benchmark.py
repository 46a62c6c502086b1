"""The paper benchmark against real servers: first what it asks of them, then all of lmms-eval."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper.__main__ import VENV
from benchmarks.paper.cells import Cell, CellStore
from benchmarks.paper.columns import BENCHMARKS
from benchmarks.paper.errors import EvaluationError
from benchmarks.paper.evaluation import TASKS, Evaluator
from benchmarks.paper.measuring import Measurement
from benchmarks.paper.published import paper_tables
from benchmarks.paper.scenes_task import SCENES
from benchmarks.paper.served import Endpoint, mean_milliseconds
from benchmarks.shared.client import ServerError
from benchmarks.shared.provenance import ROOT
from tests.pictures import make_picture
from tests.server.running import Server, chat_body, image_part, running_server, user

RETENTIONS = (1.0, 0.111)
# The bundled model has 144 visual tokens, and 0.111 of them are 15.984: 16.
NUM_DROPPED = 144 - 16


def test_a_server_of_another_model_is_refused(server: Server) -> None:
    endpoint = Endpoint.at(f"{server.url}/v1/")
    assert (endpoint.url, endpoint.model) == (server.url, "tiny-llava")
    with pytest.raises(ServerError, match=r"measured on llava-hf/llava-1\.5-7b-hf"):
        endpoint.check(paper_tables()["llava15"], "Ours")


def test_times_come_from_the_servers_metrics(server: Server) -> None:
    endpoint = Endpoint.at(server.url)
    before = endpoint.times()
    message = user("What is this?", image_part(make_picture(64, 48)))
    assert server.post("/v1/chat/completions", chat_body(message)).status_code == 200
    times = mean_milliseconds(before, endpoint.times())
    assert times["inference"] > times["prefill"] > 0


@dataclass(frozen=True)
class Run:
    """One run of the command on the bundled model."""

    server: Server
    evaluator: Evaluator
    results: Path
    output: str

    def command(self) -> list[str]:
        command = [sys.executable, "-m", "benchmarks.paper", "scenes", "--server", self.server.url]
        return [*command, "--results", str(self.results), "--python", str(self.evaluator.python)]

    def cell(self, retention: float) -> Cell:
        cell = CellStore(self.results).read(SCENES, "Ours", retention, "scenes")
        assert cell is not None
        return cell

    def samples(self, retention: float) -> list[dict[str, Any]]:
        folder = CellStore(self.results).folder(SCENES, "Ours", retention, "scenes")
        latest = max(folder.glob("*/*/*_samples_msdg_scenes.jsonl"))
        return [json.loads(line) for line in latest.read_text().splitlines()]


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    try:
        return Evaluator.of(VENV if VENV.is_file() else Path(sys.executable))
    except EvaluationError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def run(evaluator: Evaluator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("paper")
    with running_server(ROOT / "models/scenes-llava", folder / "server.log") as server:
        run = Run(server, evaluator, folder / "results", "")
        done = subprocess.run(run.command(), cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        yield replace(run, output=done.stdout)


def test_the_retention_arrives_with_every_request(run: Run) -> None:
    unpruned, pruned = (
        [sample["token_counts"][0]["input_tokens"] for sample in run.samples(retention)]
        for retention in RETENTIONS
    )
    assert len(unpruned) > 40
    assert pruned == [tokens - NUM_DROPPED for tokens in unpruned]


@pytest.mark.parametrize("retention", RETENTIONS)
def test_the_score_is_that_of_direct_requests(run: Run, retention: float) -> None:
    lines = (run.results / "scenes" / "questions.jsonl").read_text().splitlines()
    right = 0
    for question in map(json.loads, lines):
        picture = image_part(Path(question["image"]).read_bytes())
        body = chat_body(user(question["question"], picture), retention=retention, max_tokens=8)
        answer = run.server.post("/v1/chat/completions", body).json()
        right += answer["choices"][0]["message"]["content"].lower() == question["answer"].lower()
    assert right > len(lines) / 2
    assert run.cell(retention).num_questions == len(lines)
    assert run.cell(retention).score == pytest.approx(100 * right / len(lines))


def test_the_table_shows_what_was_measured(run: Run) -> None:
    base, score = (run.cell(retention).score for retention in RETENTIONS)
    assert f"| Unpruned | 1 | measured | {base:.1f} | 100.0 |" in run.output
    assert f"| Ours | 0.111 | measured | {score:.1f} | {100 * score / base:.1f} |" in run.output


def test_the_same_command_measures_only_what_is_missing(run: Run) -> None:
    unpruned, pruned = (
        CellStore(run.results).folder(SCENES, "Ours", retention, "scenes") / "cell.json"
        for retention in RETENTIONS
    )
    before = unpruned.stat().st_mtime_ns
    pruned.unlink()
    again = subprocess.run(run.command(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stdout) == (0, run.output), again.stderr[-3000:]
    assert unpruned.stat().st_mtime_ns == before


def test_a_timed_request_takes_nothing_from_a_cache(run: Run, tmp_path: Path) -> None:
    # Six questions about each picture: without care all but the first would find it in a cache.
    table = replace(SCENES, retentions=(), unpruned_milliseconds={"inference": 1.0, "prefill": 1.0})
    store = CellStore(tmp_path, limit=12)
    before = run.server.metrics()
    endpoint = Endpoint.at(run.server.url)
    Measurement(table, "Ours", endpoint, run.evaluator, store).run(("scenes",))
    after = run.server.metrics()
    cell = store.read(table, "Ours", 1.0, "scenes")
    assert cell is not None
    assert cell.milliseconds["inference"] > cell.milliseconds["prefill"] > 0

    def grown(name: str) -> float:
        return sum(after[key] - before.get(key, 0) for key in after if key.startswith(name))

    assert grown("vllm:prefix_cache_queries_total") > 0
    assert grown("vllm:prefix_cache_hits_total") == 0
    assert grown("vllm:mm_cache_queries_total") > 0
    assert grown("vllm:mm_cache_hits_total") == 0


def test_requests_that_fail_are_an_error_not_a_low_score(run: Run, tmp_path: Path) -> None:
    model_args = {"model": "no-such-model", "base_url": f"{run.server.url}/v1", "retention": 0.5}
    model_args |= {"method": "msdg", "max_retries": "1"}
    with pytest.raises(EvaluationError, match=r"2 of 2 requests got no answer.*no-such-model"):
        run.evaluator.run(
            BENCHMARKS["scenes"], tmp_path, model_args, limit=2, include=run.results / "scenes"
        )


def test_lmms_eval_has_every_task_and_metric_of_the_columns(evaluator: Evaluator) -> None:
    wanted = {
        task: list(benchmark.metrics)
        for name, benchmark in BENCHMARKS.items()
        if name != "scenes"
        for task in benchmark.tasks
    }
    listing = """
import json, sys
from lmms_eval.tasks import TaskManager
from lmms_eval.utils import load_yaml_config
manager = TaskManager("ERROR", include_path=sys.argv[1])
found = {}
for task in json.loads(sys.argv[2]):
    path = manager.task_index[task]["yaml_path"]
    found[task] = [m["metric"] for m in load_yaml_config(path, mode="simple")["metric_list"]]
print(json.dumps(found))
"""
    done = subprocess.run(
        [evaluator.python, "-c", listing, str(TASKS), json.dumps(list(wanted))],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {task: set(metrics) - set(found[task]) for task, metrics in wanted.items()} == {
        task: set() for task in wanted
    }

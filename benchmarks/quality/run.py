"""Run: ask a running server everything, and score what it says."""

import argparse
import hashlib
import time
from collections import defaultdict
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.quality.answers import Answers, key_of
from benchmarks.quality.asking import Endpoint
from benchmarks.quality.cases import (
    HARD_SPLITS,
    RETENTIONS,
    SPLITS,
    UNPRUNED,
    SceneId,
    parse_retention,
    scene_ids,
)
from benchmarks.quality.drawing import draw_scene
from benchmarks.quality.groups import DOWNSAMPLING, grouped, usable_kinds
from benchmarks.quality.questions import Question
from benchmarks.quality.record import provenance, source_hash, weights_hash
from benchmarks.quality.results import UNPRUNED_NAME, Mark, Table, report, write
from benchmarks.shared.client import ServerError
from benchmarks.shared.pictures import data_url
from benchmarks.shared.provenance import RESULTS, RUNS

BASELINE = "random"
OURS = "msdg"


@dataclass(frozen=True, slots=True)
class Job:
    """One question in one setting, and what names its answer."""

    scene: SceneId
    question: Question
    picture: str  # a data URL
    name: str
    retention: Fraction
    key: str


class Runner:
    """Asks one server, with a bounded number of requests at once."""

    def __init__(self, endpoint: Endpoint, model: Path, answers: Answers) -> None:
        self.endpoint = endpoint
        self.answers = answers
        # Any answer tells which configuration gives it; another one must not share the keys.
        probe = endpoint.ask(_picture(SceneId("test", 0, 0)), "Is there a sign?", OURS)
        self.facts = {
            "weights": weights_hash(model),
            "code": source_hash(),
            "server": probe.fingerprint,
            "profile": endpoint.description["encoder"]["profile"],
        }

    def jobs(
        self, scenes: list[SceneId], methods: list[str], retentions: list[Fraction]
    ) -> list[Job]:
        """Return every question in every setting, the unpruned one among them."""
        settings = [(UNPRUNED_NAME, UNPRUNED)]
        settings += [(m, r) for m in methods for r in retentions if r != UNPRUNED]
        jobs = []
        for scene in scenes:
            picture = _picture(scene)
            shown = hashlib.sha256(picture.encode()).hexdigest()
            for question in scene.questions():
                for name, retention in settings:
                    asked = {"picture": shown, "question": question.text}
                    setting = {"method": name, "retention": str(retention)}
                    key = key_of({**self.facts, **asked, **setting})
                    jobs.append(Job(scene, question, picture, name, retention, key))
        return jobs

    def ask_all(self, jobs: list[Job], concurrency: int) -> None:
        """Ask what has no answer yet; the first failure ends it and is raised."""
        missing = [job for job in jobs if self.answers.get(job.key) is None]
        bar = tqdm(total=len(jobs), initial=len(jobs) - len(missing), unit=" questions")
        pool = ThreadPoolExecutor(concurrency)
        try:
            futures = [pool.submit(self._ask, job, bar) for job in missing]
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        finally:
            # After a failure, or a key press, nothing more is sent.
            pool.shutdown(cancel_futures=True)
            bar.close()

    def marks(self, jobs: list[Job]) -> list[Mark]:
        """Return whether each answer is exactly what was expected."""
        return [
            Mark(
                job.scene,
                job.question.kind,
                job.name,
                job.retention,
                self._answer(job)["answer"] == job.question.answer,
            )
            for job in jobs
        ]

    def visual_tokens(self, jobs: list[Job]) -> dict[str, float]:
        """Return the mean number of visual tokens the language model saw, by retention.

        Scaling fits a grid into the budget and is counted apart.
        """
        kept: dict[str, list[int]] = defaultdict(list)
        for job in jobs:
            apart = f" {job.name}" if "resize" in job.name else ""
            kept[f"{job.retention}{apart}"].append(self._answer(job)["visual_tokens"])
        return {setting: sum(counts) / len(counts) for setting, counts in kept.items()}

    def _answer(self, job: Job) -> dict[str, Any]:
        answer = self.answers.get(job.key)
        assert answer is not None
        return answer

    def _ask(self, job: Job, bar: "tqdm[Any]") -> None:
        said = self.endpoint.ask(job.picture, job.question.text, job.name, job.retention)
        self.answers.add(
            job.key,
            {
                **asdict(job.scene),
                "kind": job.question.kind,
                "question": job.question.text,
                "expected": job.question.answer,
                "answer": said.text,
                "name": job.name,
                "retention": str(job.retention),
                "visual_tokens": said.visual_tokens,
                "prompt_tokens": said.prompt_tokens,
            },
        )
        bar.update()


def _picture(scene: SceneId) -> str:
    return data_url(draw_scene(scene.scene()))


def model_folder(endpoint: Endpoint, given: Path | None) -> Path:
    """Return where the served weights are on this machine: they name every answer."""
    folder = given or Path(endpoint.root)
    if not folder.is_dir():
        raise ServerError(
            f"the server has its model from {endpoint.root!r}, which is no folder here; name a "
            "copy of it with --weights, so that its hash can be written down"
        )
    return folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server", default="http://127.0.0.1:8000", metavar="URL", help="default: %(default)s"
    )
    parser.add_argument(
        "--methods", nargs="+", metavar="METHOD", help="default: all that the server offers"
    )
    parser.add_argument(
        "--retentions",
        nargs="+",
        type=parse_retention,
        default=list(RETENTIONS),
        metavar="FRACTION",
        help="default: 1/3 2/9 1/9 1/18; unpruned is always asked too",
    )
    parser.add_argument(
        "--splits",
        nargs="+",
        choices=[*SPLITS, *HARD_SPLITS],
        default=list(SPLITS),
        help="kinds of scenes (default: test held_out)",
    )
    parser.add_argument(
        "--groups",
        choices=DOWNSAMPLING,
        help="part the questions by what this downsampling still answers, as VTC-Bench does",
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds of scenes (default: 3)")
    parser.add_argument(
        "--scenes", type=int, default=25, help="of each seed and split (default: %(default)s)"
    )
    parser.add_argument(
        "--concurrency", type=int, default=32, help="requests at once (default: %(default)s)"
    )
    parser.add_argument(
        "--weights", type=Path, metavar="FOLDER", help="default: where the server has them from"
    )
    parser.add_argument(
        "--answers", type=Path, help="file of answers to go on from (default: one per model)"
    )
    parser.add_argument(
        "--output", type=Path, help="default: benchmarks/results/quality-MODEL.json"
    )


def main(arguments: argparse.Namespace) -> Path:
    """Ask, score, and return where the results were written."""
    endpoint = Endpoint(arguments.server)
    methods = arguments.methods or endpoint.methods
    endpoint.check_methods(methods)
    folder = model_folder(endpoint, arguments.weights)
    name = folder.resolve().name
    answers = Answers(arguments.answers or RUNS / "quality" / f"answers-{name}.jsonl")
    runner = Runner(endpoint, folder, answers)
    scenes = scene_ids(arguments.splits, arguments.seeds, arguments.scenes)
    jobs = runner.jobs(scenes, methods, arguments.retentions)
    start, known = time.perf_counter(), len(answers)
    runner.ask_all(jobs, arguments.concurrency)
    seconds, asked = time.perf_counter() - start, len(answers) - known
    retentions = sorted(set(arguments.retentions) - {UNPRUNED}, reverse=True)
    facts = {
        **provenance(folder),
        "server": {
            "fingerprint": runner.facts["server"],
            "architecture": endpoint.description["architecture"],
            "encoder": endpoint.description["encoder"],
        },
        "scenes": {
            "splits": arguments.splits,
            "seeds": arguments.seeds,
            "per_seed": arguments.scenes,
        },
        "asked": {"questions": asked, "seconds": round(seconds, 1)},
        "visual_tokens": runner.visual_tokens(jobs),
    }
    table = Table("Methods", tuple((m, m) for m in methods), OURS, tuple(retentions))
    reference = BASELINE if BASELINE in methods else None
    output: Path = arguments.output or RESULTS / f"quality-{name}.json"
    results = report(facts, runner.marks(jobs), [table], reference)
    if arguments.groups:
        usable = usable_kinds(results["entries"])
        results["groups"] = {
            "baseline": arguments.groups,
            "kinds": {split: sorted(kinds) for split, kinds in usable.items()},
            "entries": grouped(runner.marks(jobs), arguments.groups, arguments.splits, usable),
        }
    write(results, output)
    return output

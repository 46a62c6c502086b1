"""One run of lmms-eval, in a process and an environment of its own."""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.paper.columns import Benchmark
from benchmarks.paper.errors import EvaluationError
from benchmarks.shared.provenance import ROOT

TASKS = Path(__file__).parent / "tasks"
LOG = "lmms-eval.log"
INSTALL = "python -m venv .venv-paper && .venv-paper/bin/pip install --group paper"

# What lmms-eval puts in the place of an answer it did not get; it would be scored as a wrong one.
_NO_ANSWER = re.compile(r"\[LMMS_EVAL_(?:REQUEST_FAILED|BUDGET_EXCEEDED)[^\"]*")
_PROGRESS = re.compile(rb"Model Responding:.*?\| (\d+)/(\d+) ")
_DOWNLOAD = re.compile(
    r"LocalTokenNotFound|ConnectionError|ConnectTimeout|LocalEntryNotFound|MaxRetryError|"
    r"OfflineMode|GatedRepo|DatasetNotFound|Couldn't (?:reach|find)|Name or service not known"
)
_ERROR_LINE = re.compile(r"^(?:[\w.]*(?:Error|Exception|NotFound|Timeout)\b.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Evaluator:
    """lmms-eval in the environment of one interpreter."""

    python: Path
    version: str

    @classmethod
    def of(cls, python: Path) -> "Evaluator":
        """Find lmms-eval beside `python`, or raise an `EvaluationError` that says how to get it."""
        find = "import importlib.metadata as m; print(m.version('lmms_eval'))"
        try:
            found = subprocess.run(
                [python, "-c", find], capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise EvaluationError(
                f"cannot run {python}: {error}; install with: {INSTALL}"
            ) from error
        if found.returncode:
            raise EvaluationError(
                f"{python} has no lmms-eval; install it in an environment of its own with: "
                f"{INSTALL}, or name the interpreter that has it with --python"
            )
        return cls(python, found.stdout.strip())

    def run(
        self,
        benchmark: Benchmark,
        folder: Path,
        model_args: dict[str, Any],
        *,
        limit: int | None = None,
        include: Path = TASKS,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> "Outcome":
        """Run the tasks of `benchmark`, with everything lmms-eval writes under `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        command: list[str | Path] = [self.python, "-m", "benchmarks.paper.lmms_model"]
        command += ["--model", "msdg", "--tasks", ",".join(benchmark.tasks), "--batch_size", "1"]
        command += ["--model_args", ",".join(f"{name}={v}" for name, v in model_args.items())]
        command += ["--include_path", include.resolve(), "--log_samples"]
        command += ["--output_path", folder.resolve()]
        command += ["--limit", str(limit)] if limit else []
        # Tasks drop files where they run. The path lets lmms-eval find this package.
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        token = os.environ.get("HF_TOKEN", "").encode()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        with (
            (folder / LOG).open("wb") as output,
            subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            ) as process,
        ):
            assert process.stdout
            try:
                # Progress bars end in \r, so there are no lines to read.
                while chunk := os.read(process.stdout.fileno(), 1 << 16):
                    # lmms-eval logs the token when it is in the environment.
                    output.write(chunk.replace(token, b"***") if token else chunk)
                    if seen := _PROGRESS.findall(chunk):
                        on_progress(int(seen[-1][0]), int(seen[-1][1]))
            except BaseException:
                process.terminate()
                raise
        return read_outcome(benchmark, folder)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave.

    Attributes:
        score: In the paper's unit.
        results: All metrics, as lmms-eval reports them.
        prompt_tokens: The mean over requests of what the language model saw.
    """

    score: float
    results: dict[str, Any]
    num_questions: int
    prompt_tokens: float


def read_outcome(benchmark: Benchmark, folder: Path) -> Outcome:
    """Read what lmms-eval wrote under `folder`, or raise an `EvaluationError` that says why not."""
    # Whatever happens, lmms-eval ends with status 0: only its files tell.
    log = folder / LOG
    written = sorted(folder.glob("*/*_results.json"))
    if not written:
        raise EvaluationError(_failure(benchmark, log))
    results = json.loads(written[-1].read_text(encoding="utf-8"))["results"]
    samples = list(_samples(folder, benchmark))
    failed = [found.group() for line in samples if (found := _NO_ANSWER.search(line))]
    if failed or not samples:
        raise EvaluationError(
            f"{len(failed)} of {len(samples)} requests got no answer, and lmms-eval would count "
            f"them as wrong: {failed[0] if failed else 'it asked nothing'}. See {log}"
        )
    tokens = [_prompt_tokens(json.loads(line)) for line in samples]
    return Outcome(benchmark.score(results), results, len(samples), sum(tokens) / len(tokens))


def _samples(folder: Path, benchmark: Benchmark) -> Iterator[str]:
    for task in benchmark.tasks:
        for path in folder.glob(f"*/*_samples_{task}.jsonl"):
            yield from path.read_text(encoding="utf-8").splitlines()


def _prompt_tokens(sample: dict[str, Any]) -> int:
    counts = sample.get("token_counts") or [{}]
    return int((counts[0] or {}).get("input_tokens") or 0)


def _failure(benchmark: Benchmark, log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace")
    # The retries' own error, which comes last, only says that there were some.
    causes = [line for line in _ERROR_LINE.findall(text) if "RetryError" not in line]
    cause = causes[-1][:300] if causes else "it says no reason"
    tasks = ", ".join(benchmark.tasks)
    if _DOWNLOAD.search(text):
        return (
            f"the data set of {tasks} cannot be downloaded ({cause}). It comes from the Hugging "
            "Face hub on first use, and most tasks want a login even for public data: run "
            "`hf auth login`, check the network and HF_HUB_OFFLINE; HF_HOME names the cache. "
            f"See {log}"
        )
    return f"lmms-eval gave no result for {tasks}: {cause}. See {log}"

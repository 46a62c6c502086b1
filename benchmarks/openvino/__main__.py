"""What a CPU user may pick instead: OpenVINO GenAI with its CDPruner, beside this server.

    python -m venv .venv-openvino && .venv-openvino/bin/pip install --group openvino
    python -m benchmarks.openvino        # writes benchmarks/results/openvino.json

A mid-size Qwen2.5-VL of random weights (benchmarks/serving/midsize_qwen.py), exported once. Both
are up the whole time and one of them works at a time, in rounds through all cases, each request
with a picture of its own. One request at a time: batching is not compared.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.serving import midsize_qwen
from benchmarks.serving.__main__ import (
    CLOCK,
    ENVIRONMENT,
    MIDSIZE_ENVIRONMENT,
    MIDSIZE_OPTIONS,
)
from benchmarks.serving.rounds import QUESTION, Server
from benchmarks.shared.pictures import picture, picture_url
from benchmarks.shared.provenance import RESULTS, ROOT, RUNS, provenance
from benchmarks.shared.server_process import PRUNING_SERVER, running

PYTHON = ROOT / ".venv-openvino" / "bin" / "python"
FOLDER = RUNS / "openvino"
OUTPUT = RESULTS / "openvino.json"
MAX_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Case:
    """How a request is served; without a method it is OpenVINO's."""

    name: str
    retention: float
    method: str | None = None
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Sample:
    """What one request took, in seconds, and the tokens of its prompt."""

    ttft: float
    latency: float
    prompt_tokens: int
    decoding: float = 0.0


def cases(retention: float) -> list[Case]:
    """Ours and theirs, whole and pruned; theirs with one thread, as vLLM's worker, and with two."""
    return [
        Case("ours, unpruned", 1.0, "msdg"),
        Case("ours, msdg", retention, "msdg"),
        Case("ours, cdpruner", retention, "cdpruner"),
        Case("ours, resize", retention, "resize"),
        *(
            Case(f"OpenVINO, {threads} thread{'s' * (threads > 1)}, {what}", kept, None, threads)
            for threads in (1, 2)
            for what, kept in (("unpruned", 1.0), ("cdpruner", retention))
        ),
    ]


class Rival:
    """OpenVINO GenAI in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.versions = self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"OpenVINO GenAI ended; its words are in {FOLDER}")
        said: dict[str, Any] = json.loads(line)
        return said

    def ask(self, file: Path, retention: float) -> Sample:
        """Ask about a picture."""
        assert self._process.stdin is not None
        asked = {"picture": str(file), "question": QUESTION, "max_tokens": MAX_TOKENS}
        asked["pruning_ratio"] = round(100 * (1 - retention))
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return Sample(**self._read())


@contextmanager
def rival(python: Path, checkpoint: Path, threads: int) -> Iterator[Rival]:
    """Start OpenVINO GenAI, and stop it at the end."""
    command = [str(python), str(Path(__file__).with_name("rival.py")), str(checkpoint)]
    command += [str(FOLDER / "model"), str(threads)]
    pipe = subprocess.PIPE
    with (
        (FOLDER / f"rival-{threads}.log").open("w") as log,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True) as process,
    ):
        try:
            yield Rival(process)
        finally:
            process.terminate()


def ask(server: Server, case: Case, number: int) -> Sample:
    """Ask our server about a picture."""
    wishes: dict[str, Any] = {"retention": case.retention, "pruning": {"method": case.method}}
    url = picture_url(number, midsize_qwen.PICTURE_SIZE)
    answer = server.client.ask(server.question_body(MAX_TOKENS, url, **wishes))
    return Sample(answer.ttft, answer.latency, answer.prompt_tokens)


def run(python: Path, rounds: int, retention: float) -> dict[str, Any]:
    """Start both, measure all cases, stop them."""
    checkpoint = midsize_qwen.build()
    FOLDER.mkdir(parents=True, exist_ok=True)
    samples: dict[str, list[Sample]] = {case.name: [] for case in cases(retention)}
    options = ["--model", str(checkpoint), CLOCK, "--no-enable-prefix-caching", *MIDSIZE_OPTIONS]
    environment = {**ENVIRONMENT, **MIDSIZE_ENVIRONMENT}
    with (
        rival(python, checkpoint, 1) as slow,
        rival(python, checkpoint, 2) as fast,
        running(PRUNING_SERVER, options, FOLDER / "server.log", environment) as started,
    ):
        server = Server(started.url)
        for number in tqdm(range(1 + rounds), unit="round"):
            for case in cases(retention)[:: -1 if number % 2 else 1]:
                file = FOLDER / "picture.jpg"
                place = len(samples) * number + list(samples).index(case.name)
                if case.method is not None:
                    sample = ask(server, case, place)
                else:
                    picture(place, midsize_qwen.PICTURE_SIZE).save(file, quality=88)
                    sample = (slow if case.threads == 1 else fast).ask(file, case.retention)
                if number:  # the first round warms up
                    samples[case.name].append(sample)
        versions = fast.versions
    return {
        "command": shlex.join(["python", "-m", "benchmarks.openvino", *sys.argv[1:]]),
        **provenance(),
        "rival": versions,
        "retention": retention,
        "samples": {name: [asdict(sample) for sample in own] for name, own in samples.items()},
    }


def table(results: dict[str, Any]) -> str:
    """Return medians as Markdown."""
    lines = [
        "| | prompt tokens | TTFT | answers/s | decoding the picture, apart |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, samples in results["samples"].items():
        median = {key: statistics.median(one[key] for one in samples) for key in samples[0]}
        apart = f"{1000 * median['decoding']:.0f} ms" if median["decoding"] else "in TTFT"
        lines.append(
            f"| {name} | {median['prompt_tokens']:.0f} | {median['ttft']:.2f} s | "
            f"{1 / median['latency']:.2f} | {apart} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.openvino",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--python", type=Path, default=PYTHON, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--retention", type=float, default=0.111, help="default: %(default)s")
    arguments = parser.parse_args()
    if not arguments.python.is_file():
        parser.error(f"{arguments.python} is not there; the help above says how to make it")
    results = run(arguments.python, arguments.rounds, arguments.retention)
    OUTPUT.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results), f"Wrote {OUTPUT}", sep="\n\n")


if __name__ == "__main__":
    main()

"""What each method costs a request: encoder, selection and time to first token, in one run.

    python -m benchmarks.serving.costs       # writes benchmarks/results/method-costs.json

One server with a mid-size Qwen2.5-VL of random weights (midsize_qwen.py); rounds go through all
methods in an order of their own, one request at a time, each with a picture of its own.
"""

import argparse
import json
import random
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.serving import midsize_qwen
from benchmarks.serving.__main__ import (
    CLOCK,
    ENVIRONMENT,
    LOGS,
    MIDSIZE_ENVIRONMENT,
    MIDSIZE_OPTIONS,
)
from benchmarks.serving.rounds import Server
from benchmarks.shared.pictures import picture_url
from benchmarks.shared.provenance import RESULTS, provenance
from benchmarks.shared.server_process import PRUNING_SERVER, running

OUTPUT = RESULTS / "method-costs.json"
UNPRUNED = "unpruned"
MAX_TOKENS = 2
# Measured in this run; the tokens that the language model saw beside them.
TIMES = ("encoder", "selection", "ttft")


def measure(server: Server, method: str, retention: float, number: int) -> dict[str, float]:
    """Send one request and return its times in seconds, and its tokens."""
    body = server.question_body(MAX_TOKENS, picture_url(number, midsize_qwen.PICTURE_SIZE))
    if method != UNPRUNED:
        body |= {"retention": retention, "pruning": {"method": method}}
    before = server.selection_seconds()
    server.encoder_seconds()
    answer = server.client.ask(body)
    selection = server.selection_seconds() - before
    return {
        # The clock is around both.
        "encoder": server.encoder_seconds() - selection,
        "selection": selection,
        "ttft": answer.ttft,
        "visual_tokens": float(answer.visual_tokens or 0),
    }


def run(rounds: int, retention: float) -> dict[str, Any]:
    """Start a server, measure every method that it offers, and stop it."""
    folder = midsize_qwen.build()
    options = ["--model", str(folder), CLOCK, *MIDSIZE_OPTIONS]
    environment = {**ENVIRONMENT, **MIDSIZE_ENVIRONMENT}
    samples: dict[str, list[dict[str, float]]] = {}
    with running(PRUNING_SERVER, options, LOGS / "costs.log", environment) as started:
        server = Server(started.url)
        methods = [UNPRUNED, *server.client.description()["methods"]]
        with tqdm(total=(1 + rounds) * len(methods), file=sys.stderr) as bar:
            for number in range(1 + rounds):
                for place, method in enumerate(random.Random(number).sample(methods, len(methods))):
                    picture = 1 + number * len(methods) + place
                    sample = measure(server, method, retention, picture)
                    if number:  # the first round warms up
                        samples.setdefault(method, []).append(sample)
                    bar.update()
    return {
        "command": shlex.join(["python", "-m", "benchmarks.serving.costs", *sys.argv[1:]]),
        **provenance(),
        "model": "mid-size Qwen2.5-VL with random weights (benchmarks.serving.midsize_qwen)",
        "retention": retention,
        "rounds": rounds,
        "samples": {method: samples[method] for method in methods},
    }


def table(results: dict[str, Any]) -> str:
    """Return medians in milliseconds as Markdown, the fastest first."""
    medians = {
        method: {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
        for method, samples in results["samples"].items()
    }
    whole = medians[UNPRUNED]["ttft"]
    lines = [
        "| | visual tokens | encoder | selection | TTFT | of unpruned |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for method, median in sorted(medians.items(), key=lambda item: item[1]["ttft"]):
        times = [f"{1000 * median[name]:.1f} ms" for name in TIMES]
        lines.append(
            f"| {method} | {median['visual_tokens']:.0f} | {' | '.join(times)} | "
            f"{median['ttft'] / whole:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.costs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--retention", type=float, default=0.111, help="default: %(default)s")
    parser.add_argument("--results", type=Path, default=OUTPUT, help="default: %(default)s")
    arguments = parser.parse_args()
    results = run(arguments.rounds, arguments.retention)
    arguments.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results), f"Wrote {arguments.results}", sep="\n\n")


if __name__ == "__main__":
    main()

"""Do to a real server what goes wrong in the field, and say what it survived.

    python -m benchmarks.chaos                        # everything once, about 15 minutes
    python -m benchmarks.chaos --only stop --times 20
    python -m benchmarks.chaos --only fuzz --requests 10000

Starts servers of its own on 127.0.0.1 with the bundled model; nothing else is touched. Writes
outcomes.json and table.md into the folder, and ends with 1 if something was not survived.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

from benchmarks.chaos.endings import ENDINGS, freeze, stop_early
from benchmarks.chaos.loads import LOADS, fuzzed, image_flood
from benchmarks.chaos.outcome import Outcome, table
from benchmarks.shared.provenance import ROOT, RUNS, provenance
from benchmarks.shared.server_process import (
    PRUNING_SERVER,
    STOCK_SERVER,
    Started,
    running,
    starting,
    stock_environment,
)

MODEL = ROOT / "models" / "scenes-llava"
OPTIONS = (
    *("--model", str(MODEL), "--served-model-name", MODEL.name),
    "--enforce-eager",
    "--max-num-queued-reqs=32",
    '--limit-mm-per-prompt={"image": 400}',
)
# As small as vLLM allows: requests are preempted and images encoded again.
SMALL_KV = "--num-gpu-blocks-override=20"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
FREEZE, EARLY, FUZZ, FLOOD = "freeze", "stop-early", "fuzz", "image-flood"
NAMES = (*ENDINGS, EARLY, FREEZE, *LOADS, FLOOD, FUZZ)
# Tries of a stop during the start are spread over so many seconds: imports, the engine, a warm-up.
EARLY_SECONDS = 40
UNPRUNED_IMAGES = 13
"""As many images of 144 tokens as fit the 2,048 of the bundled model beside a question."""


def server(folder: Path, name: str) -> AbstractContextManager[Started]:
    """Start a server for one part of the run."""
    options = (*OPTIONS, SMALL_KV) if name == "overload" else OPTIONS
    return running(PRUNING_SERVER, options, folder / f"{name}.log", ENVIRONMENT)


def stock_server(folder: Path) -> AbstractContextManager[Started]:
    """Start vLLM as it is, to compare with."""
    environment = ENVIRONMENT | stock_environment()
    return running(STOCK_SERVER, OPTIONS, folder / "stock.log", environment)


def run(names: Sequence[str], times: int, num_requests: int, folder: Path) -> Iterator[Outcome]:
    """Yield the outcome of each fault, as it comes."""
    for name in names:
        if name in ENDINGS:
            for _ in range(times):
                with server(folder, name) as started:
                    yield ENDINGS[name](started, MODEL.name)
        elif name == EARLY:
            for number in range(times):
                log = folder / f"{name}.log"
                with starting(PRUNING_SERVER, OPTIONS, log, ENVIRONMENT) as started:
                    yield stop_early(started, 2 + EARLY_SECONDS * number / times)
        elif name == FREEZE:
            with server(folder, name) as started:
                for _ in range(times):
                    yield freeze(started, MODEL.name)
    if not (loads := [name for name in names if name not in (*ENDINGS, EARLY, FREEZE)]):
        return
    small = "overload" in loads
    for group in ([["overload"]] if small else []) + [[n for n in loads if n != "overload"]]:
        if not group:
            continue
        with server(folder, group[0]) as started:
            for name in group:
                if name == FLOOD:
                    with stock_server(folder) as stock:
                        urls = (started.url, MODEL.name, stock.url)
                        for _ in range(times):
                            yield asyncio.run(image_flood(*urls, UNPRUNED_IMAGES))
                elif name == FUZZ:
                    yield asyncio.run(fuzzed(started.url, MODEL.name, num_requests))
                else:
                    for _ in range(times):
                        yield asyncio.run(LOADS[name](started.url, MODEL.name))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the faults that are asked for and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--only", action="append", choices=NAMES, help="a fault; may be repeated")
    parser.add_argument("--times", type=int, default=1, help="tries of each, but for fuzzing")
    parser.add_argument("--requests", type=int, default=1000, help="fuzzed requests")
    parser.add_argument("--folder", type=Path, default=RUNS / "chaos")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for outcome in run(options.only or NAMES, options.times, options.requests, options.folder):
        outcomes.append(outcome)
        mark = "survived" if outcome.survived else "FAILED"
        print(f"{outcome.fault}: {mark}, {outcome.seconds:.1f} s: {outcome.note}", flush=True)
        record = {"source": provenance(), "outcomes": [asdict(item) for item in outcomes]}
        (options.folder / "outcomes.json").write_text(json.dumps(record, indent=1) + "\n")
        (options.folder / "table.md").write_text(table(outcomes) + "\n")
    print(table(outcomes))
    return 0 if all(outcome.survived for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

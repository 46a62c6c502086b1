"""What pruning buys: this server beside stock vLLM, on one machine, in one run.

    python -m benchmarks.serving run       # measures; writes benchmarks/results/serving.json
    python -m benchmarks.serving render    # puts the tables and the plot into docs/
    python -m benchmarks.serving repeats           # the same for pictures that repeat
    python -m benchmarks.serving render-repeats

Without --model it builds a mid-size LLaVA-1.5 with random weights (midsize.py): a tiny model would
hide the effect. Both servers are up the whole time and one of them works at a time; rounds go
through all cases, the servers taking turns in who is first, so that a slow minute of the machine
hits all alike. Every request of `run` has a picture of its own, so that no cache hides work.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.serving import midsize, repeats
from benchmarks.serving.page import goals_table, render, summary
from benchmarks.serving.rounds import Benchmark, Server
from benchmarks.serving.samples import Results
from benchmarks.shared.client import ServerError
from benchmarks.shared.provenance import RESULTS, RUNS, provenance
from benchmarks.shared.retention_mix import parse_mix
from benchmarks.shared.server_process import (
    PRUNING_SERVER,
    STOCK_SERVER,
    StartError,
    running,
    stock_environment,
)

OUTPUT = RESULTS / "serving.json"
REPEATS_OUTPUT = RESULTS / "serving-repeats.json"
LOGS = RUNS / "serving"
RETENTIONS = (1.0, 0.333, 0.222, 0.111, 0.056)
RUN_COMMAND = "python -m benchmarks.serving run"
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}  # for the encoder's clock
CLOCK = "--worker-extension-cls=benchmarks.serving.encoder_clock.EncoderClock"
# What the mid-size model needs: no network, little memory, a quick start.
MIDSIZE_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
MIDSIZE_NAME = "mid-size LLaVA-1.5 with random weights (benchmarks.serving.midsize)"
MIDSIZE_OPTIONS = ("--dtype=bfloat16", "--enforce-eager", "--max-model-len=2048")


@dataclass(frozen=True, slots=True)
class Servers:
    """Both servers, and what a result says about how they were started."""

    stock: Server
    pruning: Server
    source: dict[str, Any]


@contextmanager
def both_servers(arguments: argparse.Namespace, bar: Any) -> Iterator[Servers]:
    """Start both servers, and stop them at the end."""
    environment, options = dict(ENVIRONMENT), list(arguments.server_options)
    model = arguments.model
    if model is None:
        print(f"Building the mid-size model in {midsize.FOLDER}", file=sys.stderr)
        model = str(midsize.build())
        environment |= MIDSIZE_ENVIRONMENT
        options = [*MIDSIZE_OPTIONS, *options]
    options = ["--model", model, CLOCK, *options]
    source = {
        "command": shlex.join(["python", "-m", "benchmarks.serving", *sys.argv[1:]]),
        **provenance(),
        "model": arguments.model or MIDSIZE_NAME,
        "server_options": [option for option in options if option != CLOCK][2:],
        "environment": {
            name: value
            for name, value in sorted({**os.environ, **environment}.items())
            if name.startswith("VLLM_")
        },
        "concurrency": arguments.concurrency,
        "max_tokens": arguments.max_tokens,
    }
    with ExitStack() as stack:
        bar.set_description("starting stock vLLM")
        stock = stack.enter_context(
            running(
                STOCK_SERVER, options, LOGS / "stock.log", {**environment, **stock_environment()}
            )
        )
        bar.update()
        bar.set_description("starting msdg-vllm")
        pruning = stack.enter_context(
            running(PRUNING_SERVER, options, LOGS / "msdg.log", environment)
        )
        bar.update()
        yield Servers(Server(stock.url), Server(pruning.url), source)


def _follow(bar: Any, work: Iterator[str]) -> None:
    for done in work:
        bar.set_postfix_str(done, refresh=False)
        bar.update()


def run(arguments: argparse.Namespace) -> Results:
    """Start both servers, measure everything, stop them."""
    rounds, burst_rounds = arguments.rounds, arguments.burst_rounds
    num_cases = 1 + len(arguments.retention)
    per_round = num_cases + len(arguments.retention)
    steps = 2 + per_round * (1 + rounds) + num_cases * burst_rounds
    with (
        tqdm(total=steps, file=sys.stderr, dynamic_ncols=True) as bar,
        both_servers(arguments, bar) as servers,
    ):
        benchmark = Benchmark(
            servers.stock, servers.pruning, arguments.retention, arguments.max_tokens
        )
        bar.set_description("warm-up")
        _follow(bar, benchmark.sample_round(0))
        benchmark.samples.clear()
        for number in range(max(rounds, burst_rounds)):
            if number < rounds:
                bar.set_description(f"one at a time, round {number + 1}/{rounds}")
                _follow(bar, benchmark.sample_round(number + 1))
            if number < burst_rounds:
                bar.set_description(f"saturation, round {number + 1}/{burst_rounds}")
                work = benchmark.burst_round(number + 1, arguments.concurrency, arguments.requests)
                _follow(bar, work)
        return Results(servers.source, benchmark.samples, benchmark.bursts)


def run_repeats(arguments: argparse.Namespace) -> repeats.Repeats:
    """Start both servers, ask again and again about the same pictures, stop them."""
    rounds, crowd_rounds = arguments.rounds, arguments.burst_rounds
    num_cases = 1 + len(repeats.RETENTIONS)
    per_round = 2 * num_cases + len(repeats.RETENTIONS)
    steps = 2 + per_round * (1 + rounds) + 2 * num_cases * crowd_rounds
    with (
        tqdm(total=steps, file=sys.stderr, dynamic_ncols=True) as bar,
        both_servers(arguments, bar) as servers,
    ):
        benchmark = repeats.RepeatBenchmark(servers.stock, servers.pruning, arguments.max_tokens)
        bar.set_description("warm-up")
        _follow(bar, benchmark.single_round(0))
        benchmark.asked.clear()
        bar.set_description("two questions about a picture")
        for number in range(rounds):
            _follow(bar, benchmark.single_round(number + 1))
        bar.set_description("many questions at once")
        for number in range(crowd_rounds):
            work = benchmark.crowd_round(number + 1, arguments.concurrency, arguments.requests)
            _follow(bar, work)
        source = {**servers.source, "rounds": rounds, "requests": arguments.requests}
        return repeats.Repeats(source, benchmark.asked, benchmark.crowds, repeats.picture_seconds())


def _retentions(text: str) -> list[float]:
    try:
        found = [retention for retention in parse_mix(text) if retention is not None]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    # 1.0 is what the others are compared with.
    return sorted({1.0, *found}, reverse=True)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def make_parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    epilog = "Options behind -- go to both servers: -- --gpu-memory-utilization 0.45"
    measure = commands.add_parser("run", help="measure, and write the JSON", epilog=epilog)
    again = commands.add_parser("repeats", help="the same for pictures that repeat", epilog=epilog)
    measure.add_argument(
        "--retention", type=_retentions, default=list(RETENTIONS), metavar="LIST",
        help=f"default: {','.join(map(str, RETENTIONS))}",
    )  # fmt: skip
    for command, defaults in ((measure, (10, 3, 8, 8, 8)), (again, (4, 1, 8, 16, 8))):
        command.add_argument("--model", help="default: a mid-size LLaVA-1.5 with random weights")
        for default, name, text in zip(
            defaults,
            ("rounds", "burst-rounds", "concurrency", "requests", "max-tokens"),
            (
                "rounds of single requests",
                "rounds at saturation",
                "requests at once at saturation",
                "requests per case and round at saturation",
                "tokens of every answer",
            ),
            strict=True,
        ):
            command.add_argument(
                f"--{name}", type=_positive, default=default, help=f"{text}; default: {default}"
            )
        command.add_argument("server_options", nargs="*", metavar="-- SERVER OPTIONS")
    show = commands.add_parser("render", help="put tables and plot of a run into docs/")
    show_again = commands.add_parser("render-repeats", help="put the tables of repeats into docs/")
    for command, path in (
        (measure, OUTPUT),
        (show, OUTPUT),
        (again, REPEATS_OUTPUT),
        (show_again, REPEATS_OUTPUT),
    ):
        command.add_argument(
            "--results", type=Path, default=path, help="the JSON; default: %(default)s"
        )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    arguments = make_parser().parse_args(argv)
    actions: dict[str, Callable[[argparse.Namespace], None]] = {
        "run": _run_and_print,
        "render": lambda options: print("Wrote", *render(options.results)),
        "repeats": _run_repeats_and_print,
        "render-repeats": lambda options: print("Wrote", repeats.render(options.results)),
    }
    try:
        actions[arguments.command](arguments)
    except FileNotFoundError as error:
        print(f"serving: no {error.filename}; measure first: {RUN_COMMAND}", file=sys.stderr)
        return 1
    except (StartError, ServerError) as error:
        print(f"serving: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("serving: interrupted; both servers were stopped", file=sys.stderr)
        return 130
    return 0


def _run_and_print(arguments: argparse.Namespace) -> None:
    results = run(arguments)
    results.save(arguments.results)
    print(summary(results), goals_table(results), f"Wrote {arguments.results}", sep="\n\n")


def _run_repeats_and_print(arguments: argparse.Namespace) -> None:
    results = run_repeats(arguments)
    results.save(arguments.results)
    print(repeats.summary(results), f"Wrote {arguments.results}", sep="\n\n")


if __name__ == "__main__":
    sys.exit(main())

"""What pruning buys: this server beside stock vLLM, on one machine, in one run.

    python -m benchmarks.serving run       # measures; writes benchmarks/results/serving.json
    python -m benchmarks.serving render    # puts the tables and the plot into docs/

Without --model it builds a mid-size LLaVA-1.5 with random weights (benchmarks/midsize.py): a tiny
model would hide the effect. Both servers are up the whole time and one of them works at a time;
rounds go through all cases, the servers taking turns in who is first, so that a slow minute of the
machine hits all alike.
Every request has a picture of its own, so that no cache hides work.
"""

import argparse
import os
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import requests
from tqdm import tqdm

from benchmarks import midsize
from benchmarks.chat import Answer, ChatError, served_model, stream
from benchmarks.endpoint import (
    PRUNING_SERVER,
    STOCK_SERVER,
    StartError,
    running,
    stock_environment,
)
from benchmarks.pictures import picture_url
from benchmarks.provenance import provenance
from benchmarks.serving_results import PRUNING, STOCK, TEXT, Burst, Results, Sample
from benchmarks.serving_tables import goals_table, render, summary

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "serving.json"
LOGS = HERE / "runs" / "serving"
RETENTIONS = (1.0, 0.333, 0.222, 0.111, 0.056)
RUN_COMMAND = "python -m benchmarks.serving run"
QUESTION = "What is on the left of the red square?"
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}  # for the encoder's clock
CLOCK = "--worker-extension-cls=benchmarks.encoder_clock.EncoderClock"
# What the mid-size model needs: no network, little memory, a quick start.
MIDSIZE_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
MIDSIZE_OPTIONS = ("--dtype=bfloat16", "--enforce-eager", "--max-model-len=2048")

# A worker of vLLM looks for work without a pause until a second after it had some.
REST_SECONDS = 1.5

_numbers = count(1)  # of pictures and texts: none comes twice


class Server:
    """One of the two servers, as a client sees it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.session = requests.Session()
        self.model = served_model(self.session, url)
        self._call_workers("start_encoder_clock")

    def body(self, max_tokens: int, **fields: Any) -> dict[str, Any]:
        """A request for exactly `max_tokens` tokens, each of which arrives by itself."""
        return {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }

    def image_body(self, max_tokens: int, retention: float | None) -> dict[str, Any]:
        """A request about a picture that nobody asked about before."""
        number = next(_numbers)
        content = [
            {"type": "image_url", "image_url": {"url": picture_url(number)}},
            {"type": "text", "text": QUESTION},
        ]
        body = self.body(max_tokens, messages=[{"role": "user", "content": content}])
        return body if retention is None else {**body, "retention": retention}

    def text_body(self, max_tokens: int, num_tokens: int) -> dict[str, Any]:
        """A request of exactly `num_tokens` tokens of text that nobody sent before."""
        chance = random.Random(next(_numbers))
        return self.body(max_tokens, prompt=[chance.randrange(10, 250) for _ in range(num_tokens)])

    def send(self, body: dict[str, Any], session: requests.Session | None = None) -> Answer:
        """Send a request and read its answer."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        return stream(session or self.session, self.url + path, body)

    def encoder_seconds(self) -> float:
        """Seconds that the vision encoder ran since the last call."""
        return sum(self._call_workers("read_encoder_clock"))

    def metric(self, name: str) -> float:
        """Sum of a metric's samples over all labels; 0 if the server has no such metric."""
        page = self.session.get(f"{self.url}/metrics", timeout=60).text
        lines = (line for line in page.splitlines() if line.partition("{")[0] == name)
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def _call_workers(self, method: str) -> list[float]:
        response = self.session.post(
            f"{self.url}/collective_rpc", json={"method": method}, timeout=60
        )
        response.raise_for_status()
        # Tensor-parallel ranks do the same work: the first speaks for all.
        first: list[float] | None = response.json()["results"][0]
        return first or []


def case_order(
    number: int, retentions: Sequence[float], texts: Sequence[tuple[str, float]] = ()
) -> list[tuple[str, float]]:
    """Return the cases of a round: one server after the other, stock vLLM first in odd rounds.

    Stock vLLM and retention 1.0, whose difference is the smallest, are always neighbours. In round
    0 the texts come last.
    """
    chance = random.Random(number)
    others = [(PRUNING, r) for r in retentions if r != 1.0]
    texts = chance.sample(texts, len(texts))
    order = [
        *texts,
        (STOCK, 1.0),
        (PRUNING, 1.0),
        *chance.sample(others, len(others)),
    ]
    return order if number % 2 else order[::-1]


class Benchmark:
    """All cases on two servers that are up."""

    def __init__(
        self, stock: Server, pruning: Server, retentions: Sequence[float], max_tokens: int
    ) -> None:
        self.stock = stock
        self.pruning = pruning
        self.retentions = retentions
        self.max_tokens = max_tokens
        self.samples: list[Sample] = []
        self.bursts: list[Burst] = []
        self._prompt_tokens: dict[float, int] = {}
        self._last_server: Server | None = None

    def _server(self, case: str) -> Server:
        """Return the server of a case, after the other one has come to rest."""
        server = self.pruning if case == PRUNING else self.stock
        if server is not self._last_server:
            time.sleep(REST_SECONDS)
            self._last_server = server
        return server

    def sample_round(self, number: int) -> Iterator[str]:
        """Send one request of every case, one after the other; yields after each."""
        # The first round tells how long the texts must be, so they come last in it.
        texts = [(TEXT, r) for r in self.retentions]
        for case, retention in case_order(number, self.retentions, texts):
            self.samples.append(self._sample(number, case, retention))
            yield f"{case} {retention:g}"

    def _sample(self, number: int, case: str, retention: float) -> Sample:
        server = self._server(case)
        if case == TEXT:
            body = server.text_body(self.max_tokens, self._prompt_tokens[retention])
        else:
            body = server.image_body(self.max_tokens, retention if case == PRUNING else None)
        before = server.metric("msdg_selection_seconds_sum")
        server.encoder_seconds()
        answer = server.send(body)
        if case == PRUNING:
            self._prompt_tokens[retention] = answer.prompt_tokens
        return Sample(
            round=number,
            case=case,
            retention=retention,
            ttft=answer.ttft,
            latency=answer.latency,
            prompt_tokens=answer.prompt_tokens,
            encoder=server.encoder_seconds(),
            selection=server.metric("msdg_selection_seconds_sum") - before,
        )

    def burst_round(self, number: int, concurrency: int, num_requests: int) -> Iterator[str]:
        """Saturate each server with every case, one after the other; yields after each."""
        for case, retention in case_order(number, self.retentions):
            self.bursts.append(self._burst(number, case, retention, concurrency, num_requests))
            yield f"{case} {retention:g} x {concurrency}"

    def _burst(
        self, number: int, case: str, retention: float, concurrency: int, num_requests: int
    ) -> Burst:
        server = self._server(case)
        wanted = retention if case == PRUNING else None
        bodies = [server.image_body(self.max_tokens, wanted) for _ in range(num_requests)]
        name = "vllm:prompt_tokens_total"
        before = server.metric(name)
        start = time.perf_counter()
        with ThreadPoolExecutor(concurrency) as pool:
            list(pool.map(lambda body: server.send(body, requests.Session()), bodies))
        seconds = time.perf_counter() - start
        prompt_tokens = int(server.metric(name) - before)
        return Burst(number, case, retention, num_requests, seconds, prompt_tokens)


def run(arguments: argparse.Namespace) -> Results:
    """Start both servers, measure everything, stop them."""
    environment, options = dict(ENVIRONMENT), list(arguments.server_options)
    model = arguments.model
    if model is None:
        print(f"Building the mid-size model in {midsize.FOLDER}", file=sys.stderr)
        model = str(midsize.build())
        environment |= MIDSIZE_ENVIRONMENT
        options = [*MIDSIZE_OPTIONS, *options]
    options = ["--model", model, CLOCK, *options]
    rounds, burst_rounds = arguments.rounds, arguments.burst_rounds
    num_cases = 1 + len(arguments.retention)
    per_round = num_cases + len(arguments.retention)
    steps = 2 + per_round * (1 + rounds) + num_cases * burst_rounds
    with tqdm(total=steps, file=sys.stderr, dynamic_ncols=True) as bar, ExitStack() as stack:

        def follow(work: Iterator[str]) -> None:
            for done in work:
                bar.set_postfix_str(done, refresh=False)
                bar.update()

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
        benchmark = Benchmark(
            Server(stock.url), Server(pruning.url), arguments.retention, arguments.max_tokens
        )
        bar.set_description("warm-up")
        follow(benchmark.sample_round(0))
        benchmark.samples.clear()
        for number in range(max(rounds, burst_rounds)):
            if number < rounds:
                bar.set_description(f"one at a time, round {number + 1}/{rounds}")
                follow(benchmark.sample_round(number + 1))
            if number < burst_rounds:
                bar.set_description(f"saturation, round {number + 1}/{burst_rounds}")
                follow(benchmark.burst_round(number + 1, arguments.concurrency, arguments.requests))
    source = {
        "command": shlex.join(["python", "-m", "benchmarks.serving", *sys.argv[1:]]),
        **provenance(),
        "model": arguments.model or "mid-size LLaVA-1.5 with random weights (benchmarks.midsize)",
        "server_options": [option for option in options if option != CLOCK][2:],
        "environment": {
            name: value
            for name, value in sorted({**os.environ, **environment}.items())
            if name.startswith("VLLM_")
        },
        "concurrency": arguments.concurrency,
        "max_tokens": arguments.max_tokens,
    }
    return Results(source, benchmark.samples, benchmark.bursts)


def _retentions(text: str) -> list[float]:
    from benchmarks.retention_mix import parse_mix

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
    measure = commands.add_parser(
        "run",
        help="measure, and write the JSON",
        epilog="Options behind -- go to both servers: -- --gpu-memory-utilization 0.45",
    )
    measure.add_argument("--model", help="default: a mid-size LLaVA-1.5 with random weights")
    measure.add_argument(
        "--retention", type=_retentions, default=list(RETENTIONS), metavar="LIST",
        help=f"default: {','.join(map(str, RETENTIONS))}",
    )  # fmt: skip
    for name, default, text in (
        ("rounds", 10, "rounds of single requests"),
        ("burst-rounds", 3, "rounds at saturation"),
        ("concurrency", 8, "requests at once at saturation"),
        ("requests", 8, "requests per case and round at saturation"),
        ("max-tokens", 8, "tokens of every answer"),
    ):
        measure.add_argument(
            f"--{name}", type=_positive, default=default, help=f"{text}; default: {default}"
        )
    measure.add_argument("server_options", nargs="*", metavar="-- SERVER OPTIONS")
    show = commands.add_parser("render", help="put tables and plot of a run into docs/")
    for command in (measure, show):
        command.add_argument(
            "--results", type=Path, default=RESULTS, help="the JSON; default: %(default)s"
        )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    arguments = make_parser().parse_args(argv)
    actions: dict[str, Callable[[argparse.Namespace], None]] = {
        "run": _run_and_print,
        "render": lambda options: print("Wrote", *render(options.results)),
    }
    try:
        actions[arguments.command](arguments)
    except FileNotFoundError as error:
        print(f"serving: no {error.filename}; measure first: {RUN_COMMAND}", file=sys.stderr)
        return 1
    except (StartError, ChatError, requests.RequestException) as error:
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


if __name__ == "__main__":
    sys.exit(main())

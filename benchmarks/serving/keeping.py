"""What keeping encoded pictures costs the first question: `python -m benchmarks.serving.keeping`.

Two servers of ours with the mid-size model, one that keeps pictures and one that does not, asked in
turn, one request at a time, each about a new picture.
"""

import argparse
import sys
import time
from contextlib import ExitStack

from tqdm import tqdm

from benchmarks.serving import midsize
from benchmarks.serving.__main__ import (
    CLOCK,
    ENVIRONMENT,
    LOGS,
    MIDSIZE_ENVIRONMENT,
    MIDSIZE_OPTIONS,
)
from benchmarks.serving.rounds import REST_SECONDS, Server
from benchmarks.shared.estimate import Estimate
from benchmarks.shared.server_process import PRUNING_SERVER, running

GIBIBYTES = (2, 0)  # the default, and off
MAX_TOKENS = 2


def measure(rounds: int, retention: float) -> list[list[float]]:
    """Return seconds to the first token, of the server that keeps pictures and of the other."""
    options = ["--model", str(midsize.build()), CLOCK, *MIDSIZE_OPTIONS]
    environment = {**ENVIRONMENT, **MIDSIZE_ENVIRONMENT}
    times: list[list[float]] = [[] for _ in GIBIBYTES]
    with ExitStack() as stack:
        servers = []
        for size in GIBIBYTES:
            own = [*options, f"--image-store-gib={size}"]
            log = LOGS / f"keeping-{size}.log"
            started = stack.enter_context(running(PRUNING_SERVER, own, log, environment))
            servers.append(Server(started.url))
        for number in tqdm(range(1 + rounds), unit="round", file=sys.stderr):
            for place in (0, 1) if number % 2 else (1, 0):
                # No pause would leave the other server's worker looking for work.
                time.sleep(REST_SECONDS)
                server = servers[place]
                answer = server.client.ask(server.image_body(MAX_TOKENS, retention))
                if number:  # the first round warms up
                    times[place].append(answer.ttft)
    return times


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--retention", type=float, default=0.111, help="default: %(default)s")
    arguments = parser.parse_args()
    kept, plain = measure(arguments.rounds, arguments.retention)
    ratio = Estimate.of_ratios(kept, plain)
    print(
        f"first question at {arguments.retention:g}: {Estimate.of(kept).median:.3f} s with the "
        f"store, {Estimate.of(plain).median:.3f} s without; ratio {ratio.median:.3f} "
        f"({ratio.low:.3f} to {ratio.high:.3f}), {arguments.rounds} rounds"
    )


if __name__ == "__main__":
    main()

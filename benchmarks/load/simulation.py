"""The same load on a queue in place of an engine, for costs that this machine does not have.

First come, first served; a request takes seconds per request, per prompt token and per encoder
token, with noise. The controller is the server's own and has to learn these costs as it does there.
"""

import heapq
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.load.outcomes import Outcome
from server.adaptive.controller import Arrival, Controller, Image, Reservation
from server.adaptive.state import Load

_TEXT_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that an engine takes, and the tokens of a picture there."""

    per_request: float
    per_token: float
    per_encoder_token: float
    image_tokens: int
    noise: float = 0.1

    def seconds(self, retention: float) -> float:
        """Return the time of a request that keeps this much of its picture."""
        prompt = _TEXT_TOKENS + retention * self.image_tokens
        encoder = self.per_encoder_token * self.image_tokens
        return self.per_request + self.per_token * prompt + encoder


COSTS = {
    # LLaVA-NeXT-7B, from the times that the paper's table of efficiency gives for one A100.
    "gpu": Costs(0.004, 36e-6, 9e-6, 2880),
    # The mid-size model on two cores, from docs/performance.md.
    "cpu": Costs(0.03, 2.94e-3, 0.99e-3, 576),
}


class _PrivateLoad:
    """A load that no other process sees."""

    def __init__(self) -> None:
        self._load = Load()

    @contextmanager
    def locked(self) -> Iterator[Load]:
        yield self._load

    locked_if_free = locked


def simulate(
    costs: Costs,
    times: Sequence[float],
    *,
    target: float,
    floor: float,
    retention: float | None,
    seed: int = 0,
) -> list[Outcome]:
    """Let requests come at `times`; None for a retention leaves it to the controller."""
    chance = random.Random(seed)
    controller = Controller(_PrivateLoad(), target=target, floor=floor, ceiling=1.0)
    free = 0.0
    waiting: list[tuple[float, int, Reservation]] = []
    outcomes: list[Outcome] = []
    for number, now in enumerate(times):
        while waiting and waiting[0][0] <= now:
            done, _, reservation = heapq.heappop(waiting)
            controller.first_token(reservation, done)
        image = Image(number + 1, costs.image_tokens)
        if retention is None:
            decision = controller.arrive(Arrival(_TEXT_TOKENS, image.num_tokens, [image]), now)
            kept = decision.retentions[0]
        else:
            kept = retention
            fixed = _TEXT_TOKENS + round(kept * image.num_tokens)
            decision = controller.arrive(Arrival(fixed, image.num_tokens), now)
        free = max(free, now) + costs.seconds(kept) * max(chance.gauss(1, costs.noise), 0.3)
        heapq.heappush(waiting, (free, number, decision.reservation))
        outcomes.append(Outcome(now, free - now, kept))
    return outcomes

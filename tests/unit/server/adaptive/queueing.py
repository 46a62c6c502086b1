"""A queue in place of an engine: first come, first served, with costs that nobody tells."""

import heapq
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from server.adaptive.controller import Arrival, Controller, Decision, Image
from server.adaptive.state import Load

TEXT_TOKENS = 40
IMAGE_TOKENS = 2880


class PrivateLoad:
    """A load that no other process sees."""

    def __init__(self) -> None:
        self.load = Load()

    @contextmanager
    def locked(self) -> Iterator[Load]:
        yield self.load

    locked_if_free = locked


def service_seconds(tokens: float, encoder_tokens: float) -> float:
    return 0.004 + 36e-6 * tokens + 9e-6 * encoder_tokens


FULL_SERVICE = service_seconds(TEXT_TOKENS + IMAGE_TOKENS, IMAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class Served:
    arrived: float
    seconds: float
    retention: float
    decision: Decision


def serve(
    controller: Controller,
    phases: Sequence[tuple[float, float]],
    *,
    retention: float | None = None,
    seed: int = 0,
) -> list[Served]:
    """Send (load, seconds) phases of requests; load 1 is what unpruned requests take in full."""
    rng = random.Random(seed)
    now = free = start = 0.0
    waiting: list[tuple[float, int, Decision]] = []
    served: list[Served] = []
    for load, seconds in phases:
        start += seconds
        while (now := now + rng.expovariate(load / FULL_SERVICE)) < start:
            while waiting and waiting[0][0] <= now:
                done, _, decision = heapq.heappop(waiting)
                controller.first_token(decision.reservation, done)
            if retention is None:
                image = Image(identity=len(served) + 1, num_tokens=IMAGE_TOKENS)
                decision = controller.arrive(Arrival(TEXT_TOKENS, IMAGE_TOKENS, [image]), now)
                kept = decision.retentions[0]
            else:
                kept = retention
                tokens = TEXT_TOKENS + round(kept * IMAGE_TOKENS)
                decision = controller.arrive(Arrival(tokens, IMAGE_TOKENS), now)
            service = service_seconds(TEXT_TOKENS + kept * IMAGE_TOKENS, IMAGE_TOKENS)
            free = max(free, now) + service * max(rng.gauss(1, 0.1), 0.3)
            heapq.heappush(waiting, (free, len(served), decision))
            served.append(Served(now, free - now, kept, decision))
        now = start
    for done, _, decision in sorted(waiting):
        controller.first_token(decision.reservation, done)
    return served

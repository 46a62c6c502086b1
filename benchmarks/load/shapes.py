"""When requests come: shapes of a load, in multiples of what unpruned requests can be served at."""

import random
from collections.abc import Mapping, Sequence

Phase = tuple[float, float]
"""A load, 1 being as many unpruned requests as the server can answer, and a share of the time."""

SHAPES: Mapping[str, Sequence[Phase]] = {
    "steady": ((0.7, 1.0),),
    "step": ((0.3, 1 / 3), (2.0, 1 / 3), (0.5, 1 / 3)),
    "bursts": ((0.2, 0.2), (3.0, 0.1), (0.2, 0.25), (3.0, 0.1), (0.2, 0.35)),
}


def arrival_times(shape: str, rate: float, seconds: float, seed: int = 0) -> list[float]:
    """Return when requests come, in seconds: a Poisson process whose rate follows a shape.

    Args:
        shape: One of `SHAPES`.
        rate: Requests a second that load 1 stands for.
        seconds: How long the load lasts.
        seed: The same one gives the same times.
    """
    chance = random.Random(seed)
    times: list[float] = []
    end = 0.0
    for load, share in SHAPES[shape]:
        now, end = end, end + share * seconds
        while (now := now + chance.expovariate(load * rate)) < end:
            times.append(now)
    return times


def overload_end(shape: str, seconds: float) -> float | None:
    """Return when the last phase ends that unpruned requests overload; None without such a one."""
    ends, end = [], 0.0
    for load, share in SHAPES[shape]:
        end += share * seconds
        if load > 1:
            ends.append(end)
    return ends[-1] if ends else None

"""Medians with the spread that a noisy machine gives them."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median and its 95 % confidence interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """Estimate from values of repeated measurements, by bootstrap with a fixed seed."""
        if not values:
            raise ValueError("an estimate needs at least one value, got none")
        chance = random.Random(0)
        medians = sorted(
            statistics.median(chance.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES)
        )
        tail = (1 - CONFIDENCE) / 2
        return cls(
            statistics.median(values),
            medians[int(tail * NUM_RESAMPLES)],
            medians[int((1 - tail) * NUM_RESAMPLES) - 1],
        )

    @classmethod
    def of_ratios(cls, numerators: Sequence[float], denominators: Sequence[float]) -> "Estimate":
        """Estimate a ratio from pairs that were measured next to each other."""
        return cls.of([a / b for a, b in zip(numerators, denominators, strict=True)])


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of all do not exceed."""
    if not values:
        raise ValueError("a percentile needs at least one value, got none")
    ordered = sorted(values)
    place = max(1, -int(-len(ordered) * percent // 100))
    return ordered[place - 1]

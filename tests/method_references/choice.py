"""What a reference returns, and what all of them share."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# What float32 may get wrong in an inner product of unit vectors, and relatively in a score.
NOISE = 4e-7


@dataclass
class Choice:
    """The kept tokens of one image, ascending, and how close the decisions were."""

    keep: list[int] = field(default_factory=list)
    rows: list[Array] = field(default_factory=list)  # of merging methods
    margin: float = math.inf

    def observe(self, distance: float, noise: float) -> None:
        """Record how far a decision was from its opposite; an exact tie is none."""
        if distance != 0.0 and noise > 0.0 and math.isfinite(distance):
            self.margin = min(self.margin, abs(distance) / noise)

    @property
    def is_clear(self) -> bool:
        """No decision was closer than float32 can tell."""
        return self.margin > 1


def cosine(a: Array, b: Array) -> float:
    """Cosine of two vectors, 0 if one of them is zero; 1 exactly for equal directions."""
    length = math.sqrt(float((a * a).sum())) * math.sqrt(float((b * b).sum()))
    if length == 0.0:
        return 0.0
    value = float((a * b).sum()) / length
    return 1.0 if abs(value - 1.0) < 1e-12 else value


def ranked(
    out: Choice,
    tokens: Sequence[int],
    score: Callable[[int], float],
    count: int,
    noise: Callable[[int], float],
) -> list[int]:
    """The first `count` tokens by descending score, ties by order; observes the cut."""
    order = sorted(tokens, key=lambda i: (-score(i), i))
    if 0 < count < len(order):
        last, following = order[count - 1], order[count]
        out.observe(score(last) - score(following), noise(last) + noise(following))
    return order[:count]


def fill(chosen: Sequence[int], budget: int, num_tokens: int) -> list[int]:
    """The chosen tokens and, for lack of others, the first of the rest; ascending."""
    rest = [i for i in range(num_tokens) if i not in chosen]
    return sorted([*chosen, *rest[: budget - len(chosen)]])

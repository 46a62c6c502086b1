"""Retention to budget: the one place where a fraction becomes a count of tokens."""

import math
from fractions import Fraction
from numbers import Integral, Real

from msdg_vllm.core.errors import RetentionError, ShapeError


def validate_retention(retention: object) -> float:
    """Return `retention` as a float in (0, 1], or raise a `RetentionError` that says what to send.

    Accepts any real number but no bool and no text: `true` or `"0.5"` in a request is a mistake
    of the client, not a budget.
    """
    if not isinstance(retention, bool) and isinstance(retention, Real):
        try:
            value = float(retention)
        except OverflowError:  # an integer can be too large for a float
            value = math.inf
        if 0.0 < value <= 1.0:
            return value
    raise RetentionError(
        f"retention must be in (0, 1], got {retention!r}; send 1.0 to turn pruning off"
    )


def num_kept_tokens(num_tokens: int, retention: float) -> int:
    """Return the budget B = max(1, floor(N * r + 1/2)), exact in the decimal text of r.

    Depends on nothing but its two arguments, so the scheduler's count, made before the encoder
    runs, always equals the number of rows the worker returns: 1 <= B <= N, and B = N at r = 1.
    The rounding is that of the number the user wrote (0.5 of 3 is 2, 0.145 of 100 is 15), not of
    its binary neighbour.

    Args:
        num_tokens: N, the number of visual tokens before pruning, at least 1.
        retention: The fraction to keep, in (0, 1].
    """
    count = validate_count("num_tokens", num_tokens, minimum=1)
    exact = Fraction(repr(validate_retention(retention)))
    return max(1, math.floor(count * exact + Fraction(1, 2)))


def validate_count(name: str, value: object, *, minimum: int, maximum: int | None = None) -> int:
    """Return `value` as an int in `minimum .. maximum`, or raise a `ShapeError`."""
    if not isinstance(value, bool) and isinstance(value, Integral):
        count = int(value)
        if count >= minimum and (maximum is None or count <= maximum):
            return count
    allowed = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    raise ShapeError(f"{name} must be an integer {allowed}, got {value!r}")

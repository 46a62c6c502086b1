"""Retention to budget."""

from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msdg_vllm.core import num_kept_tokens, validate_retention
from msdg_vllm.core.errors import MsdgError, RetentionError


@pytest.mark.parametrize(
    ("num_tokens", "retention", "budget"),
    [
        (576, 0.111, 64),
        (576, 0.222, 128),
        (576, 0.333, 192),
        (576, 0.056, 32),
        (576, 1.0, 576),
        (576, 1, 576),
        (3, 0.5, 2),  # a half rounds up
        (5, 0.5, 3),
        (100, 0.145, 15),  # 14.5 in decimal; 14.499999999999998 in binary
        (1000, 0.0285, 29),  # 28.5; 28.499999999999996 in binary
        (576, 1e-300, 1),
        (1, 0.001, 1),
        (2_000_000, 0.111, 222_000),
    ],
)
def test_the_budget_is_rounded_half_up_in_decimal(
    num_tokens: int, retention: float, budget: int
) -> None:
    assert num_kept_tokens(num_tokens, retention) == budget


@given(st.integers(1, 100_000), st.integers(1, 10_000))
def test_the_budget_follows_the_decimal_text(num_tokens: int, ten_thousandths: int) -> None:
    retention = ten_thousandths / 10_000
    exact = Decimal(num_tokens) * Decimal(ten_thousandths) / 10_000
    expected = max(1, int(exact.quantize(Decimal(1), rounding=ROUND_HALF_UP)))
    assert num_kept_tokens(num_tokens, retention) == expected


@given(
    st.integers(1, 10_000),
    st.floats(0, 1, exclude_min=True),
    st.floats(0, 1, exclude_min=True),
)
def test_the_budget_is_in_range_and_grows_with_retention(
    num_tokens: int, first: float, second: float
) -> None:
    low, high = sorted((first, second))
    assert 1 <= num_kept_tokens(num_tokens, low) <= num_kept_tokens(num_tokens, high) <= num_tokens


@pytest.mark.parametrize("retention", [np.float32(0.5), np.float64(0.5), Fraction(1, 2), 0.5])
def test_any_real_number_is_a_retention(retention: float) -> None:
    assert num_kept_tokens(10, retention) == 5
    assert validate_retention(retention) == 0.5


@pytest.mark.parametrize(
    "retention",
    [
        *(0, 0.0, -0.1, 1.0001, 2, 10**400, float("nan"), float("inf")),
        *(True, False, "0.5", None, [0.5], 0.5j),
    ],
)
def test_what_is_no_retention_is_refused_with_the_value_and_the_remedy(retention: object) -> None:
    with pytest.raises(RetentionError) as caught:
        num_kept_tokens(576, retention)  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"retention must be in (0, 1], got {retention!r}; send 1.0 to turn pruning off"
    )
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, MsdgError)


@pytest.mark.parametrize("num_tokens", [0, -1, 1.5, True, "576", None])
def test_a_token_count_must_be_a_positive_integer(num_tokens: object) -> None:
    with pytest.raises(ValueError, match="num_tokens must be an integer at least 1, got"):
        num_kept_tokens(num_tokens, 0.5)  # type: ignore[arg-type]

"""Medians and their spread."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shared.estimate import Estimate, percentile

POSITIVE = st.floats(min_value=1e-3, max_value=1e3)


@given(st.lists(POSITIVE, min_size=1, max_size=12))
def test_the_interval_holds_the_median_and_stays_within_the_values(values: list[float]) -> None:
    one = Estimate.of(values)
    assert one.median == statistics.median(values)
    assert min(values) <= one.low <= one.median <= one.high <= max(values)


def test_equal_values_have_no_spread() -> None:
    assert Estimate.of([2.0] * 5) == Estimate(2.0, 2.0, 2.0)


def test_the_interval_covers_the_true_median_about_19_times_in_20() -> None:
    chance = random.Random(1)
    trials = [Estimate.of([chance.gauss(10, 1) for _ in range(15)]) for _ in range(200)]
    covered = sum(one.low <= 10 <= one.high for one in trials) / len(trials)
    assert 0.88 <= covered <= 1.0


def test_pairs_cancel_what_slows_both() -> None:
    drift = [1.0, 5.0, 2.0, 9.0]
    one = Estimate.of_ratios([1.1 * d for d in drift], drift)
    assert one.low == pytest.approx(1.1)
    assert one.high == pytest.approx(1.1)


def test_unpaired_values_are_refused() -> None:
    with pytest.raises(ValueError, match="longer"):
        Estimate.of_ratios([1.0], [1.0, 2.0])


@pytest.mark.parametrize(("percent", "expected"), [(50, 5), (95, 10), (100, 10), (10, 1), (11, 2)])
def test_a_percentile_is_a_value_that_occurred(percent: float, expected: int) -> None:
    assert percentile([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], percent) == expected


def test_no_values_are_refused() -> None:
    for estimate in (Estimate.of, lambda values: percentile(values, 50)):
        with pytest.raises(ValueError, match="at least one value"):
            estimate([])

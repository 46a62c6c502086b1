"""Budgets of groups: whole parts, largest remainders, then the largest shares."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msdg_vllm.core.allocation import size_budgets, softmax_budgets
from tests.reference import Selection, share_budget


def by_softmax(means: list[float], sizes: list[int], budget: int) -> list[int]:
    """`softmax_budgets` for one row whose groups all exist."""
    budgets: list[int] = softmax_budgets(
        torch.tensor([means]),
        torch.ones(1, len(means), dtype=torch.bool),
        torch.tensor([sizes]),
        torch.tensor([budget]),
    )[0].tolist()
    return budgets


def by_size(sizes: list[int], budget: int) -> list[int]:
    """`size_budgets` for one row."""
    budgets: list[int] = size_budgets(torch.tensor([sizes]), torch.tensor([budget]))[0].tolist()
    return budgets


def logs(*shares: float) -> list[float]:
    """Group means whose softmax is the given shares."""
    return [math.log(share) for share in shares]


def test_whole_parts_come_first() -> None:
    assert by_softmax(logs(0.5, 0.3, 0.2), [99, 99, 99], 10) == [5, 3, 2]


def test_what_is_left_goes_to_the_largest_remainders() -> None:
    # Quotas 5.4, 2.9, 1.7.
    assert by_softmax(logs(0.54, 0.29, 0.17), [99, 99, 99], 10) == [5, 3, 2]


def test_equal_remainders_go_to_the_lower_group() -> None:
    assert by_softmax([1.0, 1.0, 1.0, 1.0], [9, 9, 9, 9], 6) == [2, 2, 1, 1]


def test_a_full_group_gets_no_remainder() -> None:
    # Quotas 1.9, 1.1: the first group is full with its whole part.
    assert by_softmax(logs(1.9 / 3, 1.1 / 3), [1, 9], 3) == [1, 2]


def test_each_group_gets_one_token_by_remainder_and_the_rest_goes_by_share() -> None:
    # Quotas 7.1, 1.8, 1.1: group 0 holds 2, so 6 are left; groups 1 and 2 get one each, the last
    # four go to group 1 as the larger share.
    assert by_softmax(logs(0.71, 0.18, 0.11), [2, 9, 9], 10) == [2, 6, 2]


def test_the_rest_overflows_to_the_next_largest_share() -> None:
    assert by_softmax(logs(0.71, 0.18, 0.11), [2, 4, 9], 10) == [2, 4, 4]


def test_equal_shares_are_filled_from_the_lower_group() -> None:
    assert by_softmax(logs(0.76, 0.12, 0.12), [2, 9, 9], 10) == [2, 6, 2]


def test_an_empty_group_takes_part_in_the_softmax_but_gets_nothing() -> None:
    # exp(0) for the empty group: quotas 2/3, 2/3, 2/3 of 2; the last is empty.
    assert by_softmax([0.0, 0.0, 0.0], [5, 5, 0], 2) == [1, 1, 0]


def test_a_group_that_does_not_exist_takes_no_part() -> None:
    budgets = softmax_budgets(
        torch.tensor([[0.0, 0.0, 50.0]]),
        torch.tensor([[True, True, False]]),
        torch.tensor([[5, 5, 0]]),
        torch.tensor([5]),
    )
    assert budgets.tolist() == [[3, 2, 0]]


def test_means_far_apart_still_have_an_order() -> None:
    # In float32 exp(-200) and exp(-150) are both 0.
    assert by_softmax([200.0, 0.0, 50.0], [1, 9, 9], 4) == [1, 1, 2]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
def test_means_that_are_not_finite_still_spend_the_budget(value: float) -> None:
    assert sum(by_softmax([value, 1.0, value], [4, 4, 4], 7)) == 7


def test_rows_of_a_batch_have_their_own_budget() -> None:
    means = torch.tensor([logs(0.5, 0.5), logs(0.9, 0.1), [0.0, 0.0]])
    sizes = torch.tensor([[5, 5], [5, 5], [0, 0]])
    active = torch.tensor([[True, True], [True, True], [False, False]])
    budgets = softmax_budgets(means, active, sizes, torch.tensor([4, 2, 0]))
    assert budgets.tolist() == [[2, 2], [2, 0], [0, 0]]


def test_budgets_by_size_are_exact_integers() -> None:
    # 10 of 30 is a third: remainders 1/3 of 4, 7 and 10 tie and go to the lower groups.
    assert by_size([4, 7, 10, 9], 10) == [2, 2, 3, 3]
    assert by_size([0, 0], 0) == [0, 0]


@pytest.mark.parametrize("seed", range(200))
def test_budgets_are_those_of_the_reference(seed: int) -> None:
    draw = random.Random(seed)
    num_groups = draw.randint(1, 40)
    sizes = [draw.choice([0, draw.randint(0, 60)]) for _ in range(num_groups)]
    budget = draw.randint(0, sum(sizes))
    means = [draw.uniform(0, draw.choice([1, 20])) if size else 0.0 for size in sizes]
    weights = [math.exp(mean) for mean in means]
    out = Selection()
    shares = [weight / sum(weights) for weight in weights]
    expected = share_budget(out, shares, sizes, budget, share_noise=1e-5)
    if out.margin > 1:
        assert by_softmax(means, sizes, budget) == expected
    if total := sum(sizes):
        out = Selection()
        expected = share_budget(out, [size / total for size in sizes], sizes, budget, 1e-12)
        if out.margin > 1:
            assert by_size(sizes, budget) == expected


@given(st.data())
def test_the_budget_is_spent_to_the_last_token(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=40))
    budget = data.draw(st.integers(0, sum(sizes)))
    means = data.draw(st.lists(st.floats(width=32), min_size=len(sizes), max_size=len(sizes)))
    for budgets in (by_softmax(means, sizes, budget), by_size(sizes, budget)):
        assert sum(budgets) == budget
        assert all(0 <= b <= size for b, size in zip(budgets, sizes, strict=True))

"""Budgets of groups (Alg. 1, lines 14-19; Eq. 4), for R images at once."""

import torch
from torch import Tensor


def softmax_budgets(means: Tensor, active: Tensor, sizes: Tensor, budget: Tensor) -> Tensor:
    """Share the budget by softmax over group means, lines 15-19.

    Args:
        means: g, `(R, K)`; 0 for an empty group.
        active: `(R, K)`, True for groups that exist; an empty group exists.
        sizes: Tokens of each group, `(R, K)`.
        budget: `(R,)`, at most the sum of the sizes.

    Returns:
        b, `(R, K)` int64, with 0 <= b <= sizes and a sum of exactly `budget`.
    """
    # A mean that overflowed must not turn the shares into NaN. In float64, because float32 would
    # make equals of all shares below 1e-45, which a spread of 103 among the means brings about.
    exponents = means.nan_to_num().double().masked_fill(~active, -torch.inf)
    shares = exponents.softmax(dim=-1).nan_to_num()  # NaN: no group at all
    quota = budget.unsqueeze(-1) * shares
    whole = quota.floor()
    return _distribute(whole.long(), quota - whole, shares, sizes, budget)


def size_budgets(sizes: Tensor, budget: Tensor) -> Tensor:
    """Share the budget by group size: shapes and promise of `softmax_budgets`; exact integers."""
    total = sizes.sum(dim=-1, keepdim=True).clamp_min(1)
    quota = budget.unsqueeze(-1) * sizes
    return _distribute(quota // total, quota % total, sizes, sizes, budget)


def _distribute(
    whole: Tensor, remainder: Tensor, shares: Tensor, sizes: Tensor, budget: Tensor
) -> Tensor:
    """Lines 16-19: whole parts, one token each by largest remainder, the rest by largest share."""
    budgets = torch.minimum(sizes, whole)
    left = (budget - budgets.sum(dim=-1)).unsqueeze(-1)  # (R, 1)

    open_groups = budgets < sizes
    rank = _descending_rank(remainder.masked_fill(~open_groups, -1))
    budgets = budgets + (open_groups & (rank < left)).long()
    left = budget.unsqueeze(-1) - budgets.sum(dim=-1, keepdim=True)

    order = shares.argsort(dim=-1, descending=True, stable=True)
    room = (sizes - budgets).gather(1, order)
    room_before = room.cumsum(dim=-1) - room
    added = torch.minimum((left - room_before).clamp_min(0), room)
    return budgets.scatter_add(1, order, added)


def _descending_rank(values: Tensor) -> Tensor:
    """The position of each value in descending order along the last dimension, ties by index."""
    return values.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)

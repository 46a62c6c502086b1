"""Means of groups of tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor


def group_means(values: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Return the mean of the values of each group, `(G, d)`; zero for a group without any.

    Args:
        values: `(N, d)` float32.
        groups: The group of each value, `(N,)` int64; `num_groups` for none.
        num_groups: G.
    """
    # The members of a group are added up in order; index_add on a GPU has none.
    ranked, order = groups.sort(stable=True)
    starts = torch.searchsorted(ranked, torch.arange(num_groups + 1, device=groups.device))
    sums = F.embedding_bag(order, values, starts, mode="sum")[:num_groups]
    counts = (starts[1:] - starts[:-1]).unsqueeze(-1)
    return torch.where(counts > 0, sums / counts.clamp_min(1), 0.0)

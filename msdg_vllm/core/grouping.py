"""Spherical k-means with farthest-point seeding (Alg. 1, lines 7-13; Eq. 3, 5-7).

R images are grouped at once, each with its own candidates, group count and convergence.
Floating-point sums and products are launched image by image, on freshly allocated tensors of the
shapes one image has; all else is elementwise, a count or a sort. So the bits of a row do not
depend on the batch it travels in.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from msdg_vllm.core.signals import row_norms, unit_
from msdg_vllm.core.tiles import NARROW_TILE, TILE, fill_up, round_up

_MAX_ITERATIONS = 10
_LOSS_TOLERANCE = 1e-5
_LOSS_EPSILON = 1e-12
# The product of a direction with itself, or with the unit sum of its copies, comes out as 1 up to
# 5e-7 (seen over widths to 4096 and sums of 500). Above this bound two cosines are equal, so
# that the order decides between equal directions and not the rounding.
_SAME_DIRECTION = 1.0 - 2.0**-20


def group_tokens(
    directions: Sequence[Tensor], candidates: Tensor, num_groups: Tensor, max_groups: int, seed: int
) -> Tensor:
    """Return the group of each token, `(R, N)` int64, -1 for tokens that are no candidates.

    Args:
        directions: One `(N, d)` tensor per row; unit vectors or zeros where a token is a candidate.
        candidates: `(R, N)`, True for tokens to be grouped.
        num_groups: `(R,)`, K of each row, at most the number of its candidates.
        max_groups: The largest value `num_groups` may have.
        seed: The first centroid is the candidate number `seed mod M`.
    """
    num_tokens = candidates.shape[-1]
    # From here on N and K are rounded up to whole tiles; what is added is never a candidate and
    # never an active group.
    padded_tokens = round_up(num_tokens, TILE)
    padded_groups = round_up(max_groups, NARROW_TILE)
    candidates = F.pad(candidates, (0, padded_tokens - num_tokens))
    directions = [fill_up(row, padded_tokens) for row in directions]
    active = torch.arange(padded_groups, device=candidates.device) < num_groups.unsqueeze(-1)

    seeds = _farthest_points(directions, candidates, max_groups, seed)
    seeds = F.pad(seeds, (0, padded_groups - max_groups))
    centroids = [row.index_select(0, i) for row, i in zip(directions, seeds, strict=True)]
    num_candidates = candidates.sum(dim=-1).clamp_min(1)
    converged = torch.zeros_like(num_candidates, dtype=torch.bool)
    previous: tuple[Tensor, Tensor] | None = None
    for _ in range(_MAX_ITERATIONS):
        labels, nearest = _assign(directions, centroids, candidates, active)
        loss = _distance_sums(nearest, candidates) / num_candidates
        if previous is not None:
            previous_labels, previous_loss = previous
            change = (previous_loss - loss).abs() / previous_loss.abs().clamp_min(_LOSS_EPSILON)
            unchanged = (labels == previous_labels).all(dim=-1)
            # A row that has converged keeps its centroids, and with them its labels.
            converged = converged | unchanged | (change < _LOSS_TOLERANCE)
        previous = labels, loss
        updated = _update(directions, labels, nearest, candidates, active)
        centroids = [
            torch.where(done, old, new)
            for done, old, new in zip(converged, centroids, updated, strict=True)
        ]
    labels, _ = _assign(directions, centroids, candidates, active)
    return labels[:, :num_tokens]


def _farthest_points(
    directions: Sequence[Tensor], candidates: Tensor, max_groups: int, seed: int
) -> Tensor:
    """Eq. 5: the tokens whose directions seed the centroids, `(R, max_groups)`."""
    ordinal = candidates.cumsum(dim=-1)  # 1 for the first candidate
    first = torch.remainder(seed, ordinal[:, -1:].clamp_min(1)) + 1
    index = (candidates & (ordinal == first)).to(torch.uint8).argmax(dim=-1, keepdim=True)
    indices = [index]
    # Similarity to the nearest centroid; infinite, so never the smallest, for tokens that are
    # chosen or no candidates.
    nearest = torch.where(candidates, -torch.inf, torch.inf)
    for _ in range(max_groups - 1):
        products = torch.stack(
            [
                torch.mv(row, row.index_select(0, i).squeeze(0))
                for row, i in zip(directions, index, strict=True)
            ]
        )
        # fmax, because a token that is no candidate may have a direction that is not finite.
        nearest = nearest.scatter(1, index, torch.inf).fmax(products.clamp_max_(_SAME_DIRECTION))
        # The largest 1 - x is the smallest x; argmin returns the first of equal values.
        index = nearest.argmin(dim=-1, keepdim=True)
        indices.append(index)
    return torch.cat(indices, dim=-1)


def _assign(
    directions: Sequence[Tensor], centroids: Sequence[Tensor], candidates: Tensor, active: Tensor
) -> tuple[Tensor, Tensor]:
    """Line 9: the nearest centroid of each token (ties: lower group), the similarity to it."""
    products = torch.stack([row @ mu.T for row, mu in zip(directions, centroids, strict=True)])
    similarity = products.clamp_max_(_SAME_DIRECTION)  # (R, N, K)
    nearest, labels = similarity.masked_fill_(~active.unsqueeze(1), -torch.inf).max(dim=-1)
    return torch.where(candidates, labels, -1), nearest


def _distance_sums(nearest: Tensor, candidates: Tensor) -> Tensor:
    """M times the loss of Eq. 6, `(R,)`."""
    return torch.stack(
        [
            torch.where(is_candidate, 1.0 - m, 0.0).sum()
            for m, is_candidate in zip(nearest, candidates, strict=True)
        ]
    )


def _update(
    directions: Sequence[Tensor],
    labels: Tensor,
    nearest: Tensor,
    candidates: Tensor,
    active: Tensor,
) -> list[Tensor]:
    """Lines 11-12: unit sums of the members; tokens least like their centroid for empty groups."""
    num_rows, num_groups = active.shape
    sorted_labels, by_group = labels.sort(dim=-1, stable=True)
    bags = torch.arange(-1, num_groups, device=labels.device).repeat(num_rows, 1)
    starts = torch.searchsorted(sorted_labels, bags)  # (R, 1 + K), the first bag is no group
    ends = F.pad(starts[:, 1:], (0, 1), value=labels.shape[-1])
    empty = active & (starts == ends)[:, 1:]
    loneliest = nearest.masked_fill(~candidates, torch.inf).argsort(dim=-1, stable=True)
    replacements = loneliest.gather(1, (empty.cumsum(dim=-1) - 1).clamp_min(0))
    centroids = []
    for r, row in enumerate(directions):
        # Sums bag by bag in token order; index_add on a GPU adds in any order.
        sums = F.embedding_bag(by_group[r], row, starts[r], mode="sum")[1:]
        substitutes = row.index_select(0, replacements[r])
        means = unit_(sums, row_norms(sums))
        centroids.append(torch.where(empty[r].unsqueeze(-1), substitutes, means))
    return centroids

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

from msdg_vllm.core.signals import unit_and_moved
from msdg_vllm.core.tiles import NARROW_TILE, TILE, fill_up, round_up

_MAX_ITERATIONS = 10
_LOSS_TOLERANCE = 1e-5
_LOSS_EPSILON = 1e-12
# The product of two equal directions comes out as 1 up to 5e-7 (8 units in the last place, seen
# over widths to 4096 and sums of up to 500 members).
_SAME_DIRECTION = 1.0 - 2.0**-20


def group_tokens(
    directions: Sequence[Tensor], candidates: Tensor, num_groups: Tensor, max_groups: int, seed: int
) -> Tensor:
    """Return the group of each token, `(R, N)` int64, -1 for tokens that are no candidates.

    Args:
        directions: One `(N, d)` tensor per row: unit vectors or zeros, all finite.
        candidates: `(R, N)`, True for tokens to be grouped.
        num_groups: `(R,)`, K of each row, at most the number of its candidates.
        max_groups: The largest value `num_groups` may have.
        seed: The first centroid is the candidate number `seed mod M`.
    """
    num_tokens = candidates.shape[-1]
    # From here on N and K are rounded up to whole tiles; what is added is never a candidate and
    # never an active group.
    padded_tokens = round_up(num_tokens, TILE)
    candidates = F.pad(candidates, (0, padded_tokens - num_tokens))
    directions = [fill_up(row, padded_tokens) for row in directions]
    group_index = torch.arange(round_up(max_groups, NARROW_TILE), device=candidates.device)
    active = group_index < num_groups.unsqueeze(-1)  # (R, K)

    seeds = _farthest_points(directions, candidates, max_groups, seed)
    seeds = F.pad(seeds, (0, len(group_index) - max_groups))
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
    unavailable = ~candidates
    nearest = torch.full_like(candidates, -torch.inf, dtype=torch.float32)
    for _ in range(max_groups - 1):
        unavailable = unavailable.scatter(1, index, True)
        similarity = torch.stack(
            [
                torch.mv(row, row.index_select(0, i).squeeze(0))
                for row, i in zip(directions, index, strict=True)
            ]
        )
        # The largest 1 - x is the smallest x; argmin returns the first of equal values.
        nearest = torch.maximum(nearest, _cosine(similarity))
        index = nearest.masked_fill(unavailable, torch.inf).argmin(dim=-1, keepdim=True)
        indices.append(index)
    return torch.cat(indices, dim=-1)


def _assign(
    directions: Sequence[Tensor], centroids: Sequence[Tensor], candidates: Tensor, active: Tensor
) -> tuple[Tensor, Tensor]:
    """Line 9: the nearest centroid of each token (ties: lower group), the similarity to it."""
    products = torch.stack([row @ mu.T for row, mu in zip(directions, centroids, strict=True)])
    similarity = _cosine(products).masked_fill(~active.unsqueeze(1), -torch.inf)  # (R, N, K)
    nearest, labels = similarity.max(dim=-1)
    return torch.where(candidates, labels, -1), nearest


def _cosine(products: Tensor) -> Tensor:
    """Inner products of unit vectors, exactly 1 for equal directions: ties, not rounding, decide."""
    return products.masked_fill(products > _SAME_DIRECTION, 1.0)


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
    group_index = torch.arange(active.shape[-1], device=labels.device)
    members = labels.unsqueeze(1) == group_index.unsqueeze(-1)  # (R, K, N)
    empty = active & ~members.any(dim=-1)
    loneliest = nearest.masked_fill(~candidates, torch.inf).argsort(dim=-1, stable=True)
    replacements = loneliest.gather(1, (empty.cumsum(dim=-1) - 1).clamp_min(0))
    centroids = []
    for r, row in enumerate(directions):
        # Not index_add: on a GPU it adds in any order.
        sums, _ = unit_and_moved(members[r].float() @ row)
        substitutes = row.index_select(0, replacements[r])
        centroids.append(torch.where(empty[r].unsqueeze(-1), substitutes, sums))
    return centroids

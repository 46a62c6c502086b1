"""Grouping by spherical k-means with farthest-point seeding (Alg. 1, lines 7-13; Eq. 3, 5-7).

R images are grouped at once, each with its own candidates and its own convergence. Matrix
products are launched image by image, on the shapes a single image would have; everything else
is elementwise, an integer count or a sort, so a row's bits do not depend on its batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from msdg_vllm.core.signals import unit_and_moved

_MAX_ITERATIONS = 10
_LOSS_TOLERANCE = 1e-5
_LOSS_EPSILON = 1e-12


def group_tokens(
    directions: Sequence[Tensor], candidates: Tensor, num_groups: Tensor, max_groups: int, seed: int
) -> Tensor:
    """Return the group of each token, `(R, N)`, -1 for tokens that are no candidates.

    Args:
        directions: One `(N, d)` tensor per row: unit vectors or zeros, all finite.
        candidates: `(R, N)`, True for tokens to be grouped.
        num_groups: `(R,)`, K of each row, at most the number of its candidates.
        max_groups: The largest K that `num_groups` may hold.
        seed: The first centroid is the candidate number `seed mod M`.
    """
    inactive = torch.arange(max_groups, device=candidates.device) >= num_groups.unsqueeze(-1)
    num_candidates = candidates.sum(dim=-1).clamp_min(1)  # (R,)
    seeds, similarity = _farthest_points(directions, candidates, max_groups, seed)
    centroids = [row[index] for row, index in zip(directions, seeds, strict=True)]

    converged = torch.zeros_like(num_candidates, dtype=torch.bool)
    labels, previous_labels = None, None
    loss, previous_loss = None, None
    for _ in range(_MAX_ITERATIONS):
        labels, nearest = _assign(similarity, candidates, inactive)
        distances = torch.where(candidates, 1.0 - nearest, 0.0)
        loss = torch.stack([row.sum() for row in distances]) / num_candidates
        if previous_labels is not None and previous_loss is not None:
            change = (previous_loss - loss).abs() / previous_loss.abs().clamp_min(_LOSS_EPSILON)
            unchanged = (labels == previous_labels).all(dim=-1)
            converged = converged | unchanged | (change < _LOSS_TOLERANCE)
        previous_labels, previous_loss = labels, loss
        centroids = _update_centroids(
            directions, centroids, labels, nearest, candidates, inactive, converged
        )
        similarity = _similarity(directions, centroids)
    return _assign(similarity, candidates, inactive)[0]


def _farthest_points(
    directions: Sequence[Tensor], candidates: Tensor, max_groups: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Farthest-point sampling, Eq. 5: `(R, K)` indices, `(R, N, K)` similarities to them."""
    ordinal = candidates.cumsum(dim=-1)  # 1 for the first candidate
    first = torch.remainder(seed, ordinal[:, -1:].clamp_min(1))
    index = (candidates & (ordinal == first + 1)).to(torch.uint8).argmax(dim=-1, keepdim=True)
    chosen = ~candidates
    indices, similarities = [], []
    nearest: Tensor | None = None
    for _ in range(max_groups):
        if nearest is not None:
            index = nearest.masked_fill(chosen, torch.inf).argmin(dim=-1, keepdim=True)
        chosen = chosen.scatter(1, index, True)
        similarity = torch.stack(
            [torch.mv(row, row[i].squeeze(0)) for row, i in zip(directions, index, strict=True)]
        )
        nearest = similarity if nearest is None else torch.maximum(nearest, similarity)
        indices.append(index)
        similarities.append(similarity)
    return torch.cat(indices, dim=-1), torch.stack(similarities, dim=-1)


def _similarity(directions: Sequence[Tensor], centroids: Sequence[Tensor]) -> Tensor:
    """Inner products of directions and centroids, `(R, N, K)`."""
    return torch.stack([row @ mu.T for row, mu in zip(directions, centroids, strict=True)])


def _assign(similarity: Tensor, candidates: Tensor, inactive: Tensor) -> tuple[Tensor, Tensor]:
    """Line 9: the nearest centroid of each token (ties: lower group) and the similarity to it."""
    nearest, labels = similarity.masked_fill(inactive.unsqueeze(1), -torch.inf).max(dim=-1)
    return torch.where(candidates, labels, -1), nearest


def _update_centroids(
    directions: Sequence[Tensor],
    centroids: Sequence[Tensor],
    labels: Tensor,
    nearest: Tensor,
    candidates: Tensor,
    inactive: Tensor,
    converged: Tensor,
) -> list[Tensor]:
    """Lines 11-12: unit sums of the members; the loneliest tokens for empty groups."""
    groups = torch.arange(inactive.shape[-1], device=labels.device)
    members = labels.unsqueeze(1) == groups.unsqueeze(-1)  # (R, K, N)
    empty = ~members.any(dim=-1) & ~inactive  # (R, K)
    loneliest = nearest.masked_fill(~candidates, torch.inf).argsort(dim=-1, stable=True)
    ordinal = (empty.cumsum(dim=-1) - 1).clamp_min(0)
    replacements = loneliest.gather(1, ordinal)  # (R, K)
    weights = members.float()
    updated = []
    for r, (row, mu) in enumerate(zip(directions, centroids, strict=True)):
        moved, _ = unit_and_moved(weights[r] @ row)
        moved = torch.where(empty[r].unsqueeze(-1), row[replacements[r]], moved)
        updated.append(torch.where(converged[r], mu, moved))
    return updated

"""Spherical k-means with farthest-point seeding (Alg. 1, lines 7-13; Eq. 3, 5-7).

R images are grouped at once, each with its own candidates, group count and convergence.
Floating-point sums and products are launched image by image, on freshly allocated tensors of the
shapes one image has; all else is elementwise, a count or a sort. So the bits of a row do not
depend on the batch it travels in.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from msdg_vllm.core import kernels
from msdg_vllm.core.signals import row_norms, unit_
from msdg_vllm.core.tiles import NARROW_TILE, TILE, fill_up, round_up, token_blocks

MAX_ITERATIONS = 10
KNOWN_AT_ONCE: tuple[str, ...] = ("cpu",)
"""Types of device whose values the host may read; it would have to wait for any other."""

_LOSS_TOLERANCE = 1e-5
_LOSS_EPSILON = 1e-12
# The product of a direction with itself, or with the unit sum of its copies, comes out as 1 up to
# 5e-7 (seen over widths to 4096 and sums of 500). Above this bound two cosines are equal, so
# that the order decides between equal directions and not the rounding.
SAME_DIRECTION = 1.0 - 2.0**-20


def group_tokens(
    directions: Sequence[Tensor], candidates: Tensor, num_groups: Tensor, max_groups: int, seed: int
) -> Tensor:
    """Return the group of each token, `(R, N)` int64, -1 for tokens that are no candidates.

    Args:
        directions: One `(N, d)` tensor per row; unit vectors or zeros where a token is a candidate.
        candidates: `(R, N)`, True for tokens to be grouped.
        num_groups: `(R,)`, K of each row: 1, or the number of its candidates or `max_groups`,
            whichever is less.
        max_groups: The largest value `num_groups` may have.
        seed: The first centroid is the candidate number `seed mod M`.
    """
    labels = kernels.run(
        candidates.device,
        lambda: _by_kernels(directions, candidates, num_groups, max_groups, seed),
    )
    if labels is not None:
        return labels
    num_tokens = candidates.shape[-1]
    # From here on N and K are rounded up to whole tiles; what is added is never a candidate and
    # never an active group.
    padded_tokens = round_up(num_tokens, TILE)
    padded_groups = round_up(max_groups, NARROW_TILE)
    candidates = F.pad(candidates, (0, padded_tokens - num_tokens))
    directions = [fill_up(row, padded_tokens) for row in directions]
    active = torch.arange(padded_groups, device=candidates.device) < num_groups.unsqueeze(-1)
    num_candidates = candidates.sum(dim=-1).clamp_min(1)

    blocks = token_blocks(padded_tokens)
    limits = _Limits.of(candidates, active)
    similarity = _farthest_points(directions, candidates, padded_groups, seed)
    labels, nearest, groups = _assign(
        (similarity[..., block] for block in blocks), directions, limits
    )
    loss = _distance_sums(nearest) / num_candidates
    converged = torch.zeros_like(num_candidates, dtype=torch.bool).unsqueeze(-1)
    for turn in range(MAX_ITERATIONS):
        centroids = _centroids(groups, directions, nearest, active)
        previous_labels, previous_loss = labels, loss
        similarities = _similarities(centroids, directions, blocks)
        is_last = turn == MAX_ITERATIONS - 1
        labels, nearest, groups = _assign(similarities, [] if is_last else directions, limits)
        # A row that has converged keeps its labels; its centroids no longer matter.
        labels = torch.where(converged, previous_labels, labels)
        if is_last:
            break
        loss = _distance_sums(nearest) / num_candidates
        change = (previous_loss - loss).abs() / previous_loss.clamp_min(_LOSS_EPSILON)
        unchanged = (labels == previous_labels).all(dim=-1)
        converged = converged | (unchanged | (change < _LOSS_TOLERANCE)).unsqueeze(-1)
        if _are_known(converged):
            break
    return labels[:, :num_tokens]


def _are_known(flags: Tensor) -> bool:
    """Whether all are True, where that costs no waiting: neither for a device nor in a graph."""
    is_at_hand = flags.device.type in KNOWN_AT_ONCE and not torch.compiler.is_compiling()
    return is_at_hand and bool(flags.all())


def _by_kernels(
    directions: Sequence[Tensor], candidates: Tensor, num_groups: Tensor, max_groups: int, seed: int
) -> Tensor:
    from msdg_vllm.core.kernels.analysis import group_rows  # loads Triton

    return group_rows(directions, candidates, num_groups, max_groups, seed)


def _farthest_points(
    directions: Sequence[Tensor], candidates: Tensor, num_groups: int, seed: int
) -> Tensor:
    """Eq. 5: the products of all directions with those that seed the groups, `(R, K, N)`.

    A row with fewer candidates than groups repeats tokens; those groups are not active.
    """
    ordinal = candidates.cumsum(dim=-1)  # 1 for the first candidate
    first = torch.remainder(seed, ordinal[:, -1:].clamp_min(1)) + 1
    index = (candidates & (ordinal == first)).to(torch.uint8).argmax(dim=-1, keepdim=True)
    # Similarity to the nearest centroid; infinite, so never the smallest, for tokens that are
    # chosen or no candidates.
    nearest = torch.where(candidates, -torch.inf, torch.inf)
    similarities = []
    for _ in range(num_groups):
        chosen = [row.index_select(0, i) for row, i in zip(directions, index.unbind(), strict=True)]
        products = _stacked(
            [torch.mv(row, mu.squeeze(0)) for row, mu in zip(directions, chosen, strict=True)]
        ).clamp_max_(SAME_DIRECTION)
        similarities.append(products)
        # fmax, because a token that is no candidate may have a direction that is not finite.
        nearest = nearest.scatter(1, index, torch.inf).fmax(products)
        # The largest 1 - x is the smallest x; argmin returns the first of equal values.
        index = nearest.argmin(dim=-1, keepdim=True)
    return torch.stack(similarities, dim=1)


def _similarities(
    centroids: Sequence[Tensor], directions: Sequence[Tensor], blocks: Sequence[slice]
) -> Iterator[Tensor]:
    """The products of the tokens of each block with all centroids, `(R, K, n)`."""
    for block in blocks:
        yield _stacked([mu @ row[block].T for mu, row in zip(centroids, directions, strict=True)])


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """`torch.stack`, without a copy of a single row."""
    return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(list(rows))


@dataclass(frozen=True, slots=True)
class _Limits:
    """What never changes while R images are grouped.

    Attributes:
        excluded: `(R, N)`, True for tokens that are no candidates.
        inactive: `(R, K, 1)`, True for groups that do not exist.
        bags: `(R, K + 2)`: of tokens without a group, of group 0, 1, .., and an empty last one.
    """

    excluded: Tensor
    inactive: Tensor
    bags: Tensor

    @classmethod
    def of(cls, candidates: Tensor, active: Tensor) -> "_Limits":
        bags = torch.arange(-1, active.shape[-1] + 1, device=active.device)
        return cls(
            excluded=~candidates,
            inactive=~active.unsqueeze(-1),
            bags=bags.expand(len(active), -1).contiguous(),
        )


@dataclass(frozen=True, slots=True)
class _Groups:
    """The groups of R images: the sums of their members, `(K, d)` each, and sizes `(R, K)`."""

    sums: Sequence[Tensor]
    sizes: Tensor


def _assign(
    similarities: Iterable[Tensor], directions: Sequence[Tensor], limits: _Limits
) -> tuple[Tensor, Tensor, _Groups]:
    """Line 9: the nearest centroid of each token (ties: lower group), the similarity to it.

    A token that is excluded gets the label -1 and an infinite similarity. Members are added up
    block by block, while a block is in the cache; without directions nothing is added up.
    Overwrites the similarities, `(R, K, n)` of each block.
    """
    all_labels, all_nearest, start = [], [], 0
    groups: _Groups | None = None
    for similarity in similarities:
        block = slice(start, start := start + similarity.shape[-1])
        similarity.clamp_max_(SAME_DIRECTION).masked_fill_(limits.inactive, -torch.inf)
        nearest, labels = similarity.max(dim=1)
        excluded = limits.excluded[:, block]
        all_labels.append(labels.masked_fill_(excluded, -1))
        all_nearest.append(nearest.masked_fill_(excluded, torch.inf))
        part = _add_up([row[block] for row in directions], labels, limits.bags)
        groups = part if groups is None else _joined(groups, part)
    assert groups is not None
    return torch.cat(all_labels, dim=-1), torch.cat(all_nearest, dim=-1), groups


def _add_up(directions: Sequence[Tensor], labels: Tensor, bags: Tensor) -> _Groups:
    """The groups of the tokens of a block."""
    sorted_labels, by_group = labels.sort(dim=-1, stable=True)
    starts = torch.searchsorted(sorted_labels, bags)
    # Adds up a bag in token order; index_add on a GPU would add in any order.
    sums = [
        F.embedding_bag(by_group[r], row, starts[r, :-1], mode="sum")[1:]
        for r, row in enumerate(directions)
    ]
    return _Groups(sums, starts[:, 2:] - starts[:, 1:-1])


def _joined(groups: _Groups, more: _Groups) -> _Groups:
    sums = [total.add_(part) for total, part in zip(groups.sums, more.sums, strict=True)]
    return _Groups(sums, groups.sizes + more.sizes)


def _centroids(
    groups: _Groups, directions: Sequence[Tensor], nearest: Tensor, active: Tensor
) -> list[Tensor]:
    """Lines 11-12: unit sums of the members; tokens least like their centroid for empty groups."""
    empty = active & (groups.sizes == 0)  # (R, K)
    if _are_known(~empty):
        return [unit_(sums, row_norms(sums)) for sums in groups.sums]
    loneliest = nearest.argsort(dim=-1, stable=True)
    replacements = loneliest.gather(1, (empty.cumsum(dim=-1) - 1).clamp_min_(0))
    centroids = []
    for r, row in enumerate(directions):
        means = unit_(groups.sums[r], row_norms(groups.sums[r]))
        substitutes = row.index_select(0, replacements[r])
        centroids.append(torch.where(empty[r].unsqueeze(-1), substitutes, means))
    return centroids


def _distance_sums(nearest: Tensor) -> Tensor:
    """M times the loss of Eq. 6, `(R,)`; an infinite similarity does not count."""
    distances = (1.0 - nearest).clamp_min_(0.0)
    # Row by row: how a sum over one dimension is split may depend on the size of the other.
    return _stacked([row.sum() for row in distances.unbind()])

"""The query-dependent half of Algorithm 1: which tokens to keep (lines 4, 6 and 14-21)."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from msdg_vllm.core import kernels
from msdg_vllm.core.allocation import size_budgets, softmax_budgets
from msdg_vllm.core.analysis import ImageSignals
from msdg_vllm.core.budget import validate_count
from msdg_vllm.core.errors import ShapeError
from msdg_vllm.core.options import PAPER, Ranking, SelectionOptions
from msdg_vllm.core.signals import full_precision, query_relevance

MASK = 0x7FFFFFFF  # 31 bits: products of two such integers stay exact in 64


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What each token is worth for a question.

    Attributes:
        relevance: alpha of Eq. 2, `(.., N)` float32; ones without a query.
        score: s = alpha * u, `(.., N)` float32.
    """

    relevance: Tensor
    score: Tensor

    @classmethod
    def stack(cls, rows: Sequence["TokenScores"]) -> "TokenScores":
        """Return the scores of images of one size as those of a batch."""
        return cls(
            relevance=torch.stack([row.relevance for row in rows]),
            score=torch.stack([row.score for row in rows]),
        )


def select_tokens(
    signals: ImageSignals,
    visual: Tensor,
    query: Tensor | None,
    budget: int,
    options: SelectionOptions = PAPER,
) -> Tensor:
    """Return the tokens to keep for a query: `take_tokens` by `score_tokens`.

    Exactly `budget` distinct indices per row, ascending, whatever the values are.

    Args:
        signals: From `analyze_image`.
        visual: Projected tokens, `(.., N, D)`.
        query: Query embeddings, `(.., Q, D)` or `(Q, D)`; see `score_tokens`.
        budget: B, from 1 to N.
        options: Which variant of the method.

    Returns:
        `(.., B)` int64.
    """
    if options == PAPER and kernels.run_on(visual.device):
        _check_shapes(signals, visual, query)
        lead = signals.groups.shape[:-1]
        num_rows = prod(lead)
        rows = signals.map(lambda tensor: tensor.reshape(num_rows, *tensor.shape[len(lead) :]))
        queries = [None] * num_rows if query is None else _per_row(query, lead)
        selected = select_images(
            [rows[row] for row in range(num_rows)],
            visual.reshape(num_rows, *visual.shape[-2:]).unbind(),
            queries,
            [budget] * num_rows,
        )
        return torch.stack([keep for keep, _ in selected]).reshape(*lead, budget)
    return take_tokens(signals, score_tokens(signals, visual, query), budget, options)


@torch.no_grad()
def select_images(
    signals: Sequence[ImageSignals],
    visual: Sequence[Tensor],
    queries: Sequence[Tensor | None],
    budgets: Sequence[int],
) -> list[tuple[Tensor, TokenScores]]:
    """Select from images that may differ in size, question and budget: one call for all.

    Each gets what `select_tokens` gives it alone, and its scores.

    Args:
        signals: Of one image each: `(N,)` tensors.
        visual: `(N, D)` of each image.
        queries: `(Q, D)` of each image, or None.
        budgets: B of each image, from 1 to its N.
    """
    for image, budget in zip(signals, budgets, strict=True):
        validate_count("budget", budget, minimum=1, maximum=image.num_tokens)
    selected = kernels.run(visual[0].device, lambda: _by_kernels(signals, visual, queries, budgets))
    if selected is not None:
        return selected
    scores = [score_tokens(*row) for row in zip(signals, visual, queries, strict=True)]
    calls: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for row, budget in enumerate(budgets):
        calls[signals[row].num_tokens, budget].append(row)
    kept: dict[int, Tensor] = {}
    for (_, budget), rows in calls.items():
        own = ImageSignals.stack([signals[row] for row in rows])
        taken = take_tokens(own, TokenScores.stack([scores[row] for row in rows]), budget)
        kept.update(zip(rows, taken, strict=True))
    return [(kept[row], scores[row]) for row in range(len(signals))]


def _by_kernels(
    signals: Sequence[ImageSignals],
    visual: Sequence[Tensor],
    queries: Sequence[Tensor | None],
    budgets: Sequence[int],
) -> list[tuple[Tensor, TokenScores]]:
    from msdg_vllm.core.kernels.selection import select_rows  # loads Triton

    return [
        (keep, TokenScores(relevance, score))
        for keep, relevance, score in select_rows(signals, visual, queries, budgets)
    ]


@torch.no_grad()
def score_tokens(signals: ImageSignals, visual: Tensor, query: Tensor | None) -> TokenScores:
    """Return the relevance and the score of every token for a query, lines 4 and 6.

    Args:
        signals: From `analyze_image`.
        visual: Projected tokens, `(.., N, D)` of any floating type.
        query: Query embeddings, `(.., Q, D)`, or `(Q, D)` for all rows; None or Q = 0 sets the
            relevance to 1. Queries of unequal length fit in one batch by repeating one of their
            tokens: the maximum does not change.
    """
    _check_shapes(signals, visual, query)
    if query is None:
        relevance = torch.ones_like(signals.saliency)
        return TokenScores(relevance=relevance, score=signals.saliency)
    lead = signals.groups.shape[:-1]
    tokens = visual.reshape(-1, *visual.shape[-2:])
    with full_precision(visual.device):
        relevance = torch.stack(
            [query_relevance(x, t) for x, t in zip(tokens, _per_row(query, lead), strict=True)]
        ).reshape(signals.groups.shape)
        return TokenScores(relevance=relevance, score=relevance * signals.saliency)


def _check_shapes(signals: ImageSignals, visual: Tensor, query: Tensor | None) -> None:
    """Raise a `ShapeError` unless the tokens and the query belong to the signals."""
    lead, num_tokens = signals.groups.shape[:-1], signals.num_tokens
    if visual.shape[:-1] != (*lead, num_tokens):
        raise ShapeError(
            f"visual must have the shape {(*lead, num_tokens)} and a width, "
            f"got {tuple(visual.shape)}"
        )
    if query is None:
        return
    if query.shape[:-2] not in (lead, ()) or query.shape[-1:] != visual.shape[-1:]:
        raise ShapeError(
            f"query must have the shape (Q, {visual.shape[-1]}), with or without the leading "
            f"{tuple(lead)}, got {tuple(query.shape)}"
        )


def _per_row(query: Tensor, lead: Sequence[int]) -> Sequence[Tensor]:
    """The query of each row."""
    if query.ndim == 2:
        return [query] * prod(lead)
    return query.reshape(-1, *query.shape[-2:]).unbind()


@torch.no_grad()
def take_tokens(
    signals: ImageSignals, scores: TokenScores, budget: int, options: SelectionOptions = PAPER
) -> Tensor:
    """Return the `budget` tokens to keep, `(.., B)` int64 ascending: lines 14-21.

    A budget beyond the candidates keeps all of them, then sinks in ascending activation, tokens
    whose states are not finite after those, and padding last.
    """
    num_tokens = signals.num_tokens
    budget = validate_count("budget", budget, minimum=1, maximum=num_tokens)
    lead = signals.groups.shape[:-1]
    signals = signals.map(lambda tensor: tensor.reshape(-1, *tensor.shape[len(lead) :]))
    candidates = signals.candidate_mask
    spent = candidates.sum(dim=-1).clamp_max(budget)  # (R,)
    budgets = _group_budgets(signals, scores, spent, options)
    kept = _top_of_groups(signals, _signal(options.rank_by, signals, scores, options), budgets)
    kept = kept | (~candidates & (_place_in_line(signals) < budget))
    # A stable sort by a flag puts the kept tokens first and leaves them in their order.
    indices = (~kept).to(torch.uint8).argsort(dim=-1, stable=True)[:, :budget]
    return indices.reshape(*lead, budget)


def _group_budgets(
    signals: ImageSignals, scores: TokenScores, spent: Tensor, options: SelectionOptions
) -> Tensor:
    """Lines 14-19: how many tokens of each group to keep, `(R, K)`."""
    group_index = torch.arange(signals.max_groups, device=signals.groups.device)
    members = signals.groups.unsqueeze(1) == group_index.unsqueeze(-1)  # (R, K, N)
    sizes = members.sum(dim=-1)
    if options.budgets == "size":
        return size_budgets(sizes, spent)
    values = _signal(options.allocate_by, signals, scores, options)
    sums = torch.stack(
        [torch.where(row, s, 0.0).sum(dim=-1) for row, s in zip(members, values, strict=True)]
    )
    active = group_index < signals.num_groups.unsqueeze(-1)
    return softmax_budgets(sums / sizes.clamp_min(1), active, sizes, spent)


def _top_of_groups(signals: ImageSignals, values: Tensor, budgets: Tensor) -> Tensor:
    """Line 20: the `budgets` highest values of each group, ties by order, as a mask `(R, N)`."""
    groups = signals.groups
    # Stable sorts, the last one first: by group, inside a group by value, inside a tie by place.
    order = values.argsort(dim=-1, descending=True, stable=True)
    sorted_groups, by_group = groups.gather(1, order).sort(dim=-1, stable=True)
    order = order.gather(1, by_group)
    first = torch.searchsorted(sorted_groups, sorted_groups)  # where the token's group starts
    place = torch.arange(signals.num_tokens, device=groups.device) - first
    quota = budgets.gather(1, sorted_groups.clamp_min(0))
    top = (sorted_groups >= 0) & (place < quota)
    return torch.zeros_like(top).scatter(1, order, top)


def _place_in_line(signals: ImageSignals) -> Tensor:
    """Where each token stands when candidates go first, `(R, N)`.

    Behind them: sinks by activation, tokens that are not finite, padding; ties by order. So a
    token that is no candidate stands within the budget only if that exceeds the candidates.
    """
    candidates = signals.candidate_mask
    key = signals.sink_activation.clamp_max(torch.finfo(torch.float32).max)
    key = key.masked_fill_(~(candidates | signals.sink_mask), torch.inf)
    order = key.masked_fill_(candidates, -torch.inf).argsort(dim=-1, stable=True)
    places = torch.arange(signals.num_tokens, device=order.device).expand_as(order)
    return torch.empty_like(order).scatter(1, order, places)


def _signal(
    name: Ranking, signals: ImageSignals, scores: TokenScores, options: SelectionOptions
) -> Tensor:
    """The values of a signal, `(R, N)`."""
    if name == "saliency":
        return signals.saliency
    if name == "random":
        index = torch.arange(signals.num_tokens, device=signals.groups.device)
        return _scrambled(index, options.random_seed).expand_as(signals.groups)
    values = scores.relevance if name == "relevance" else scores.score
    return values.reshape(signals.groups.shape)


def _scrambled(index: Tensor, seed: int) -> Tensor:
    """A pseudo-random integer for each index, the same on every device: hashing in 31 bits."""
    return mix((index + 1) * 0x9E3779B1 + (seed * 0x85EBCA6B & MASK))


def mix(values: Tensor) -> Tensor:
    """Spread integers over 31 bits so that they look random: multiply and shift."""
    for multiplier in (0x45D9F3B, 0x2C1B3C6D, 0x297A2D39):
        values = values & MASK
        values = (values ^ (values >> 15)) * multiplier
    return values & MASK

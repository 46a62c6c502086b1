"""Algorithm 1 in two calls: `analyze_image` once per image, `select_tokens` per question."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from msdg_vllm.core.allocation import size_budgets, softmax_budgets
from msdg_vllm.core.budget import validate_count
from msdg_vllm.core.grouping import group_tokens
from msdg_vllm.core.options import SelectionOptions
from msdg_vllm.core.signals import query_relevance, token_signals
from msdg_vllm.errors import ShapeError
from msdg_vllm.profiles import EncoderProfile

PAPER = SelectionOptions()


@dataclass(frozen=True, slots=True)
class ImageSignals:
    """What an image says by itself, for any question and any budget; a few numbers per token.

    Holds no reference to the encoder's states, so it can be kept for the next question.

    Attributes:
        saliency: u, `(.., N)` float32; 0 where it is not finite.
        groups: `(.., N)` int64, the group of each candidate; -1 for sinks and padding.
        num_groups: K of each row, `(..)` int64: at most `max_groups` and the number of candidates.
        sink_mask: `(.., N)`, True for sinks and for tokens whose states are not finite.
        sink_activation: `(.., N)` float32, absolute value at the sink coordinate; infinite for
            tokens whose states are not finite.
        max_groups: The largest K any row may have.
    """

    saliency: Tensor
    groups: Tensor
    num_groups: Tensor
    sink_mask: Tensor
    sink_activation: Tensor
    max_groups: int

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.groups.shape[-1]

    @property
    def candidate_mask(self) -> Tensor:
        """`(.., N)`, True for tokens that compete for the budget."""
        return self.groups >= 0

    def map(self, function: Callable[[Tensor], Tensor]) -> "ImageSignals":
        """Return the signals with `function` applied to each tensor, such as one that moves it."""
        return ImageSignals(
            saliency=function(self.saliency),
            groups=function(self.groups),
            num_groups=function(self.num_groups),
            sink_mask=function(self.sink_mask),
            sink_activation=function(self.sink_activation),
            max_groups=self.max_groups,
        )

    def __getitem__(self, row: int) -> "ImageSignals":
        """Return the signals of one row of a batch."""
        return self.map(lambda tensor: tensor[row])


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What each token is worth for a question.

    Attributes:
        relevance: alpha of Eq. 2, `(.., N)` float32; ones without a query.
        score: s = alpha * u, `(.., N)` float32.
    """

    relevance: Tensor
    score: Tensor


@torch.no_grad()
def analyze_image(
    states: Mapping[int, Tensor],
    profile: EncoderProfile,
    patches_per_token: int = 1,
    *,
    valid: Tensor | None = None,
    saliency: Tensor | None = None,
    options: SelectionOptions = PAPER,
) -> ImageSignals:
    """Return sinks, saliency and groups of an image: the query-free half of Algorithm 1.

    Args:
        states: The state entering each layer that `options.layers(profile)` names (by default
            `profile.layers`), `(.., N * patches_per_token, d)` of any floating type. Patches
            that merge into one token are neighbours.
        profile: The settings for the encoder.
        patches_per_token: How many encoder patches merge into one visual token.
        valid: `(.., N)` bool, False for padding: neither a candidate nor a sink.
        saliency: `(.., N * patches_per_token)`, the scores of `options.saliency="given"`.
        options: Which variant of the method.
    """
    layers = options.layers(profile)
    lead, num_tokens = _check_states(states, layers, patches_per_token)
    num_rows = prod(lead)
    if options.sink_filter:
        _check_sink_coordinate(states, profile)
    if options.saliency == "given":
        _check_shape("saliency", saliency, (*lead, num_tokens * patches_per_token))
    if valid is not None:
        _check_shape("valid", valid, (*lead, num_tokens))

    by_row = {n: states[n].reshape(num_rows, *states[n].shape[-2:]).unbind() for n in layers}
    given = [None] * num_rows if saliency is None else saliency.reshape(num_rows, -1).unbind()
    with torch.autocast(states[layers[0]].device.type, enabled=False):
        rows = [
            token_signals(
                {n: state[r] for n, state in by_row.items()},
                profile,
                patches_per_token,
                given[r],
                options,
            )
            for r in range(num_rows)
        ]
        activation = torch.stack([row.activation for row in rows])  # (R, N)
        sink_mask = ~torch.stack([row.finite for row in rows])
        if options.sink_filter:
            sink_mask = sink_mask | (activation > profile.sink_threshold)
        candidates = ~sink_mask
        if valid is not None:
            valid_rows = valid.reshape(num_rows, -1)
            sink_mask, candidates = sink_mask & valid_rows, candidates & valid_rows

        num_candidates = candidates.sum(dim=-1)
        directions = [row.directions for row in rows if row.directions is not None]
        if directions:
            max_groups = min(profile.num_groups, num_tokens)
            moved = (torch.stack([row.moved for row in rows]) & candidates).any(dim=-1)
            num_groups = torch.where(moved, max_groups, 1).minimum(num_candidates)
            groups = group_tokens(directions, candidates, num_groups, max_groups, profile.seed)
        else:
            max_groups = 1
            num_groups = num_candidates.clamp_max(1)
            groups = torch.where(candidates, 0, -1)
    signals = ImageSignals(
        saliency=torch.stack([row.saliency for row in rows]),
        groups=groups,
        num_groups=num_groups,
        sink_mask=sink_mask,
        sink_activation=activation,
        max_groups=max_groups,
    )
    return signals.map(lambda tensor: tensor.reshape((*lead, *tensor.shape[1:])))


@torch.no_grad()
def score_tokens(signals: ImageSignals, visual: Tensor, query: Tensor | None) -> TokenScores:
    """Return the relevance and the score of every token for a query, lines 4 and 6.

    Args:
        signals: From `analyze_image`.
        visual: Projected tokens, `(.., N, D)`.
        query: Query embeddings, `(.., Q, D)`, or `(Q, D)` for all rows; None or Q = 0 sets the
            relevance to 1. Queries of unequal length fit in one batch by repeating one of their
            tokens: the maximum does not change.
    """
    lead, num_tokens = signals.groups.shape[:-1], signals.num_tokens
    if visual.shape[:-1] != (*lead, num_tokens):
        raise ShapeError(
            f"visual must be {(*lead, num_tokens)} tokens by D, got {tuple(visual.shape)}"
        )
    if query is None:
        relevance = torch.ones_like(signals.saliency)
    else:
        if query.shape[:-2] not in (lead, ()) or query.shape[-1] != visual.shape[-1]:
            raise ShapeError(
                f"query must be (Q, {visual.shape[-1]}) or {tuple(lead)} of them, "
                f"got {tuple(query.shape)}"
            )
        num_rows = prod(lead)
        queries = query.expand(*lead, *query.shape[-2:]).reshape(num_rows, *query.shape[-2:])
        tokens = visual.reshape(num_rows, *visual.shape[-2:])
        with torch.autocast(visual.device.type, enabled=False):
            relevance = torch.stack(
                [query_relevance(x, t) for x, t in zip(tokens, queries, strict=True)]
            ).reshape(*lead, num_tokens)
    return TokenScores(relevance=relevance, score=relevance * signals.saliency)


@torch.no_grad()
def take_tokens(
    signals: ImageSignals, scores: TokenScores, budget: int, options: SelectionOptions = PAPER
) -> Tensor:
    """Return the `budget` tokens to keep, `(.., B)` int64 ascending: lines 14-21.

    When the budget exceeds the candidates, all of them are kept, then sinks in ascending
    activation, tokens whose states are not finite after those and padding last.
    """
    num_tokens = signals.num_tokens
    budget = validate_count("budget", budget, minimum=1, maximum=num_tokens)
    lead = signals.groups.shape[:-1]
    groups = signals.groups.reshape(-1, num_tokens)
    candidates = groups >= 0
    group_index = torch.arange(signals.max_groups, device=groups.device)
    members = groups.unsqueeze(1) == group_index.unsqueeze(-1)  # (R, K, N)
    sizes = members.sum(dim=-1)
    num_candidates = candidates.sum(dim=-1)
    spent = num_candidates.clamp_max(budget)

    if options.budgets == "size":
        budgets = size_budgets(sizes, spent)
    else:
        by_name = {"saliency": signals.saliency, "relevance": scores.relevance}
        weight = by_name.get(options.allocate_by, scores.score).reshape(-1, num_tokens)
        sums = torch.stack(
            [torch.where(row, g, 0.0).sum(dim=-1) for row, g in zip(members, weight, strict=True)]
        )
        active = group_index < signals.num_groups.reshape(-1, 1)
        budgets = softmax_budgets(sums / sizes.clamp_min(1), active, sizes, spent)

    # Line 20: order by group, inside a group by rank, inside a tie by position.
    rank_key = _rank_key(signals, scores, options).reshape(-1, num_tokens)
    by_rank = rank_key.argsort(dim=-1, descending=True, stable=True)
    by_group = by_rank.gather(1, groups.gather(1, by_rank).argsort(dim=-1, stable=True))
    sorted_groups = groups.gather(1, by_group)
    ends = sizes.cumsum(dim=-1) + (num_tokens - num_candidates).unsqueeze(-1)  # -1 sorts first
    place = torch.arange(num_tokens, device=groups.device) - (ends - sizes).gather(
        1, sorted_groups.clamp_min(0)
    )
    kept_sorted = (sorted_groups >= 0) & (place < budgets.gather(1, sorted_groups.clamp_min(0)))
    kept = torch.zeros_like(candidates).scatter(1, by_group, kept_sorted)

    missing = (budget - spent).unsqueeze(-1)
    kept = kept | (~candidates & (_refill_rank(signals) < missing))
    # A stable sort of a 0/1 key lists the kept tokens first, in their original order.
    order = (~kept).to(torch.uint8).argsort(dim=-1, stable=True)
    return order[:, :budget].reshape(*lead, budget)


def select_tokens(
    signals: ImageSignals,
    visual: Tensor,
    query: Tensor | None,
    budget: int,
    options: SelectionOptions = PAPER,
) -> Tensor:
    """Return the tokens to keep for a query: the second half of Algorithm 1.

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
    return take_tokens(signals, score_tokens(signals, visual, query), budget, options)


def _rank_key(signals: ImageSignals, scores: TokenScores, options: SelectionOptions) -> Tensor:
    """The signal that ranks tokens inside a group, `(.., N)`."""
    if options.rank_by == "random":
        index = torch.arange(signals.num_tokens, device=signals.groups.device)
        return _scrambled(index, options.random_seed).expand_as(signals.groups)
    by_name = {"saliency": signals.saliency, "relevance": scores.relevance}
    return by_name.get(options.rank_by, scores.score)


def _scrambled(index: Tensor, seed: int) -> Tensor:
    """A fixed pseudo-random integer for each index: multiplicative hashing in 31 bits."""
    mask = 0x7FFFFFFF
    value = (index + 1) * 0x9E3779B1 + (seed * 0x85EBCA6B & mask)
    for multiplier in (0x45D9F3B, 0x2C1B3C6D, 0x297A2D39):
        value = value & mask
        value = (value ^ (value >> 15)) * multiplier
    return value & mask


def _refill_rank(signals: ImageSignals) -> Tensor:
    """The place of each token in the queue behind the candidates, `(R, N)`."""
    num_tokens = signals.num_tokens
    sinks = signals.sink_mask.reshape(-1, num_tokens)
    activation = signals.sink_activation.reshape(-1, num_tokens)
    candidates = signals.groups.reshape(-1, num_tokens) >= 0
    order = activation.argsort(dim=-1, stable=True)
    # Sinks, then padding, then candidates, which are kept anyway when the queue is used.
    tier = torch.where(sinks, 0, torch.where(candidates, 2, 1))
    order = order.gather(1, tier.gather(1, order).argsort(dim=-1, stable=True))
    places = torch.arange(num_tokens, device=order.device).expand_as(order)
    return torch.empty_like(order).scatter(1, order, places)


def _check_states(
    states: Mapping[int, Tensor], layers: tuple[int, ...], patches_per_token: int
) -> tuple[tuple[int, ...], int]:
    """Return the leading dimensions and N, or raise a `ShapeError`."""
    if missing := sorted(set(layers) - states.keys()):
        raise ShapeError(f"states of layers {missing} are missing; needed are {list(layers)}")
    shapes = {tuple(states[layer].shape) for layer in layers}
    if len(shapes) != 1:
        raise ShapeError(f"all states must have one shape, got {sorted(shapes)}")
    shape = shapes.pop()
    if len(shape) < 2 or 0 in shape:
        raise ShapeError(f"a state must be (.., N, d) and not empty, got {shape}")
    if patches_per_token < 1 or shape[-2] % patches_per_token:
        raise ShapeError(
            f"{shape[-2]} patches cannot merge by patches_per_token={patches_per_token}"
        )
    return shape[:-2], shape[-2] // patches_per_token


def _check_sink_coordinate(states: Mapping[int, Tensor], profile: EncoderProfile) -> None:
    width = states[profile.sink_layer + 1].shape[-1]
    if profile.sink_coordinate >= width:
        raise ShapeError(
            f"sink_coordinate must be below the width of the states, {width}, "
            f"got {profile.sink_coordinate}; use the profile of this encoder"
        )


def _check_shape(name: str, tensor: Tensor | None, expected: tuple[int, ...]) -> None:
    if tensor is None or tuple(tensor.shape) != expected:
        got = None if tensor is None else tuple(tensor.shape)
        raise ShapeError(f"{name} must have the shape {expected}, got {got}")

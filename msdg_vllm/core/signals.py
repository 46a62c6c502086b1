"""Signals of one image: sinks, saliency, directions, relevance (Alg. 1, lines 1-6; Eq. 1, 2).

Functions take one image, never a batch: a floating-point reduction launched on the same shape
gives the same bits whatever else travels in the batch.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from msdg_vllm.core.options import Grouping, SelectionOptions
from msdg_vllm.core.profiles import EncoderProfile
from msdg_vllm.core.tiles import NARROW_TILE, TILE, fill_up, round_up, token_blocks

# Algorithm 1: unit(z) = z / max(|z|, 1e-12).
_UNIT_EPSILON = 1e-12


@dataclass(frozen=True, slots=True)
class TokenSignals:
    """What the states of one image say about its tokens.

    Attributes:
        saliency: u, `(N,)`; 0 where not finite.
        activation: Absolute value at the sink coordinate, `(N,)`, or 0 without the sink filter;
            infinite for a token with a state, or the norm of a state, that is not finite.
        directions: `(N, d)`, unit norm or zero where the token is finite; None without grouping.
        moved: `(N,)`, True where the token is finite and its direction, if any, is not zero.
    """

    saliency: Tensor
    activation: Tensor
    directions: Tensor | None
    moved: Tensor


def token_signals(
    states: Mapping[int, Tensor],
    profile: EncoderProfile,
    patches_per_token: int,
    given_saliency: Tensor | None,
    options: SelectionOptions,
) -> TokenSignals:
    """Return the query-free signals of one image: per patch first, then merged to tokens.

    Of the patches that merge into a token the saliency and the direction are averaged, the
    latter renormalised; one sink among them, or one value that is not finite, decides for all.

    Args:
        states: The states of the layers `options.layers(profile)`, `(N * patches_per_token, d)`.
        profile: The settings for the encoder.
        patches_per_token: How many neighbouring patches merge into one token.
        given_saliency: `(N * patches_per_token,)`, used if `options.saliency` is `"given"`.
        options: Which variant of the method.
    """
    some = given_saliency if given_saliency is not None else next(iter(states.values()))
    blocks = token_blocks(len(some) // patches_per_token)
    if len(blocks) == 1:
        return _block_signals(states, profile, patches_per_token, given_saliency, options)
    parts, directions = [], None
    for block in blocks:
        patches = slice(block.start * patches_per_token, block.stop * patches_per_token)
        part = _block_signals(
            {layer: state[patches] for layer, state in states.items()},
            profile,
            patches_per_token,
            None if given_saliency is None else given_saliency[patches],
            options,
        )
        if part.directions is not None:
            if directions is None:
                directions = part.directions.new_empty(blocks[-1].stop, part.directions.shape[1])
            # Copied at once, so that the next block finds its memory warm.
            directions[block] = part.directions
        parts.append(replace(part, directions=None))
    return TokenSignals(
        saliency=torch.cat([part.saliency for part in parts]),
        activation=torch.cat([part.activation for part in parts]),
        directions=directions,
        moved=torch.cat([part.moved for part in parts]),
    )


def _block_signals(
    states: Mapping[int, Tensor],
    profile: EncoderProfile,
    patches_per_token: int,
    given_saliency: Tensor | None,
    options: SelectionOptions,
) -> TokenSignals:
    """`token_signals` for tokens that are handled together."""
    saliency = _saliency(states, profile, given_saliency, options)
    finite = saliency.isfinite()
    activation = torch.zeros_like(saliency)
    if options.sink_filter and profile.sink_state is not None:
        state = states[profile.sink_state].float()
        finite = finite & row_norms(state).isfinite()
        activation = state[:, profile.sink_coordinate].abs()
    directions: Tensor | None = None
    grouping = options.grouping_of(profile)
    if grouping != "none":
        directions, finite_directions = _directions(states, profile, grouping)
        finite = finite & finite_directions

    if patches_per_token > 1:
        saliency = _mean_over_patches(saliency, patches_per_token)
        activation = activation.view(-1, patches_per_token).amax(dim=-1)
        finite = finite.view(-1, patches_per_token).all(dim=-1)
        if directions is not None:
            directions = unit_(directions, row_norms(directions))
            directions = _mean_over_patches(directions, patches_per_token)
    moved = finite
    if directions is not None:
        norms = row_norms(directions)
        moved = finite & (norms > 0)
        directions = unit_(directions, norms)
    return TokenSignals(
        saliency=torch.where(finite, saliency, 0.0),
        activation=torch.where(finite, activation, torch.inf),
        directions=directions,
        moved=moved,
    )


def query_relevance(visual: Tensor, query: Tensor) -> Tensor:
    """Return alpha of Eq. 2: each token's highest cosine similarity to a query token.

    Finite whatever comes in: a projected token that is not finite gets the lowest cosine, -1; a
    query token that is not finite is passed over; a query with none left counts as empty.

    Args:
        visual: Projected tokens, `(N, D)`.
        query: Query embeddings, `(Q, D)`.

    Returns:
        `(N,)` float32, all ones when the query is empty.
    """
    num_tokens, num_query = visual.shape[0], query.shape[0]
    if num_query == 0:
        return visual.new_ones(num_tokens, dtype=torch.float32)
    query = fill_up(query.float(), round_up(num_query, NARROW_TILE))
    query_norms = row_norms(query)
    usable = query_norms.isfinite() & (torch.arange(len(query), device=query.device) < num_query)
    units = unit(query, query_norms).masked_fill_(~usable.unsqueeze(-1), 0.0)
    highest = []
    for block in token_blocks(num_tokens):
        x = visual[block]
        x = fill_up(x.float(), max(len(x), TILE))
        products = (x @ units.T).masked_fill_(~usable, -torch.inf)  # (n, Q)
        # Dividing by |x| after the maximum saves a pass over (n, D).
        norms = row_norms(x)
        cosines = products.amax(dim=-1) / norms.clamp_min(_UNIT_EPSILON)
        highest.append(torch.where(norms.isfinite(), cosines, -1.0))
    relevance = torch.cat(highest)[:num_tokens]
    return torch.where(usable.any(), relevance, 1.0)


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Compute in float32 and nothing less: neither autocast nor TF32 holds inside.

    A graph that is compiled cannot say the latter; its caller must.
    """
    autocast: AbstractContextManager[object] = nullcontext()
    if torch.amp.is_autocast_available(device.type):
        autocast = torch.autocast(device.type, enabled=False)
    return autocast if torch.compiler.is_compiling() else _without_tf32(autocast)


@contextmanager
def _without_tf32(autocast: AbstractContextManager[object]) -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with autocast:
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def row_norms(vectors: Tensor) -> Tensor:
    """Return the Euclidean norm of each row: `(N, d)` -> `(N,)`."""
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return norms


def unit(vectors: Tensor, norms: Tensor) -> Tensor:
    """Return unit(z) = z / max(|z|, 1e-12) for each row z of `(N, d)`, given the norms."""
    return vectors / _divisors(norms)


def unit_(vectors: Tensor, norms: Tensor) -> Tensor:
    """`unit` in place: a second `(N, d)` buffer would cost more than the division."""
    return vectors.div_(_divisors(norms))


def _divisors(norms: Tensor) -> Tensor:
    """The divisors of `unit`, `(N, 1)`."""
    return norms.clamp_min(_UNIT_EPSILON).unsqueeze(-1)


def _saliency(
    states: Mapping[int, Tensor],
    profile: EncoderProfile,
    given_saliency: Tensor | None,
    options: SelectionOptions,
) -> Tensor:
    """Line 4: how far each patch moved over the window, `(P,)`, times the profile's scale."""
    if options.saliency == "given":
        assert given_saliency is not None
        moved = given_saliency.float()
    elif profile.saliency_window is None:
        any_state = states[options.layers(profile)[0]]
        moved = torch.ones_like(any_state[:, 0], dtype=torch.float32)
    else:
        start, end = profile.saliency_window
        if options.saliency == "endpoint":
            moved = row_norms(states[end].float() - states[start].float())
        else:
            moved = torch.zeros_like(states[start][:, 0], dtype=torch.float32)
            for before, after in pairwise(range(start, end + 1)):
                moved = moved + row_norms(states[after].float() - states[before].float())
    return moved if profile.saliency_scale == 1 else moved * profile.saliency_scale


def _directions(
    states: Mapping[int, Tensor], profile: EncoderProfile, grouping: Grouping
) -> tuple[Tensor, Tensor]:
    """Line 3, Eq. 1: displacements yet to be normalised, `(P, d)`, and where finite, `(P,)`."""
    if grouping == "output":
        features = states[profile.features_layer].float()
        norms = row_norms(features)
        return unit(features, norms), norms.isfinite()
    early, late = (states[layer].float() for layer in profile.direction_layers)
    early_norms, late_norms = row_norms(early), row_norms(late)
    displacement = unit(late, late_norms).addcdiv_(early, _divisors(early_norms), value=-1)
    return displacement, early_norms.isfinite() & late_norms.isfinite()


def _mean_over_patches(values: Tensor, patches_per_token: int) -> Tensor:
    """Mean over each run of patches along dimension 0, added up in a fixed order."""
    total = values[0::patches_per_token] + values[1::patches_per_token]
    for patch in range(2, patches_per_token):
        total += values[patch::patches_per_token]
    return total.div_(patches_per_token)

"""What a method gets of an image, what it is asked, and what it gives back.

Shapes as in `msdg_vllm.core`, and P = N * patches_per_token, the patches of the encoder. What
comes out of the encoder is per patch, what comes out of the projector per token; patches that
merge into one token are neighbours.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from msdg_vllm.core.budget import validate_count
from msdg_vllm.core.stream import TokenSignals
from msdg_vllm.methods.needs import Encoder


class Mappable(Protocol):
    """Something made of tensors, which can be made again of others."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return it with `function` applied to each tensor, always in the same order."""


@dataclass(frozen=True, slots=True)
class Signals:
    """What the encoder gave, by layer; only what the method's `Needs` name is there.

    Attributes:
        states: The state that enters each layer, `(.., P, d)`.
        token_signals: What the states say about each token by itself, `(.., N)`; None if not
            asked for.
        features: What is handed to the projector, `(.., P, d)`; None if not asked for.
        class_attention: The attention of the class token to each patch, averaged over heads,
            `(.., P)` float32; with its attention to itself a row adds up to 1.
        received_attention: The attention that each patch receives, averaged over heads and over
            all queries of the image (the class token is one), `(.., P)` float32. Queries of other
            frames of a video cannot see the patch and count as 0.
        keys: Keys as the attention compares them, averaged over heads, `(.., P, head width)`
            float32.
        mlp_updates: Norm of what the layer's MLP adds to each patch, `(.., P)` float32.
    """

    states: Mapping[int, Tensor] = field(default_factory=dict)
    token_signals: TokenSignals | None = None
    features: Tensor | None = None
    class_attention: Mapping[int, Tensor] = field(default_factory=dict)
    received_attention: Mapping[int, Tensor] = field(default_factory=dict)
    keys: Mapping[int, Tensor] = field(default_factory=dict)
    mlp_updates: Mapping[int, Tensor] = field(default_factory=dict)

    def map(
        self,
        function: Callable[[Tensor], Tensor],
        of_tokens: Callable[[Tensor], Tensor] | None = None,
    ) -> "Signals":
        """Return the signals with `function` applied to each tensor.

        Where a token is more than a patch, `of_tokens` does for tokens what `function` does for
        patches; without it `function` does both.
        """
        tokens = self.token_signals

        def mapped(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
            return {layer: function(tensor) for layer, tensor in tensors.items()}

        return Signals(
            states=mapped(self.states),
            token_signals=None if tokens is None else tokens.map(of_tokens or function),
            features=None if self.features is None else function(self.features),
            class_attention=mapped(self.class_attention),
            received_attention=mapped(self.received_attention),
            keys=mapped(self.keys),
            mlp_updates=mapped(self.mlp_updates),
        )


@dataclass(frozen=True, slots=True)
class Image:
    """One image, or one tile of it, or all its tiles together.

    Attributes:
        signals: What the encoder gave.
        visual: Projected tokens, `(N, D)`; meaningless unless the method needs them.
        encoder: Where the signals come from.
        query: Embeddings of the query's distinct tokens, `(Q, D)`; None without a query.
        grids: Rows and columns of the grids that the tokens form, row by row, one grid after the
            other: an image is one grid, a video one per frame. Together they have N places.
        seed: Identifies the image's content; the same in every batch.
        project: The projector, features `(n, d)` to tokens `(n, D)`; None where it needs
            all patches of a token, so that merging can only happen behind it.
        places: Which tokens are real, `(n,)` int64 on the device of the signals; the others are
            padding, and the grids do not count them. None: all are real.
    """

    signals: Signals
    visual: Tensor
    encoder: Encoder
    query: Tensor | None = None
    grids: Sequence[tuple[int, int]] = ()
    seed: int = 0
    project: Callable[[Tensor], Tensor] | None = None
    places: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.visual.shape[-2]

    def per_token(self, values: Tensor) -> Tensor:
        """Average values over the patches of each token, `(P, ..)` to `(N, ..)` in float32."""
        patches = self.encoder.patches_per_token
        values = values.float()
        return values if patches == 1 else values.unflatten(0, (-1, patches)).mean(dim=1)

    @property
    def valid(self) -> Tensor:
        """`(N,)`, False for padding."""
        mask = torch.ones(self.num_tokens, dtype=torch.bool, device=self.visual.device)
        if self.places is not None:
            mask.fill_(False).scatter_(0, self.places, True)
        return mask

    def without_padding(self) -> "Image":
        """Return the real tokens alone."""
        places = self.places
        if places is None:
            return self

        def taken(tensor: Tensor) -> Tensor:
            by_token: Tensor = tensor.unflatten(0, (-1, self.encoder.patches_per_token))
            return by_token[places].flatten(0, 1)

        signals = self.signals.map(taken, lambda tensor: tensor[places])
        return replace(self, signals=signals, visual=self.visual[places], places=None)


@dataclass(frozen=True, slots=True)
class Question:
    """What an image is asked.

    Attributes:
        budget: How many tokens to keep.
        query: Embeddings of the query's distinct tokens, `(Q, D)`; None without a query. Images
            with the same question share the tensor.
    """

    budget: int
    query: Tensor | None = None


PADDING = {"scores": 0.0, "groups": -1, "sinks": False}
"""What a selection says of tokens that the method did not see."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tokens of an image are kept.

    Attributes:
        indices: The tokens to keep, `(B,)` int64: exactly the budget, distinct, ascending.
        embeddings: What stands in their places, `(B, D)`, of a method that merges; None leaves
            the tokens as they are.
        scores: What each token was worth, `(N,)`, for explanations; None if it has no score.
        groups: The group of each token, `(N,)` int64, -1 for none; None without groups.
        sinks: `(N,)`, True for tokens passed over as sinks; None without a sink filter.
    """

    indices: Tensor
    embeddings: Tensor | None = None
    scores: Tensor | None = None
    groups: Tensor | None = None
    sinks: Tensor | None = None

    def spread(self, places: Tensor, num_tokens: int) -> "Selection":
        """Return the same selection among `num_tokens`, of which the method saw `places`."""
        known = {name: getattr(self, name) for name in PADDING}
        return replace(
            self,
            indices=places[self.indices],
            **{
                name: values.new_full((num_tokens,), PADDING[name]).scatter(0, places, values)
                for name, values in known.items()
                if values is not None
            },
        )


def top_tokens(
    scores: Tensor, budget: int, *, first: Tensor | None = None, last: Tensor | None = None
) -> Tensor:
    """Return the places of the `budget` highest scores, ascending; ties go to the earlier token.

    Behind all others stand the tokens of `last`, and behind those the ones whose score is not
    finite.

    Args:
        scores: `(N,)`.
        budget: B, from 1 to N.
        first: `(N,)`, True for tokens that go before all others.
        last: `(N,)`, True for tokens that are kept only for lack of others.
    """
    budget = validate_count("budget", budget, minimum=1, maximum=len(scores))
    tier = torch.where(scores.isfinite(), 1, 3)
    if last is not None:
        tier = torch.where(last & (tier == 1), 2, tier)
    if first is not None:
        tier = tier.masked_fill(first, 0)
    order = torch.where(tier < 3, scores.float(), 0.0).argsort(descending=True, stable=True)
    order = order.gather(0, tier.gather(0, order).argsort(stable=True))
    ranked: Tensor = order[:budget].sort().values
    return ranked

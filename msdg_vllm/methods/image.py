"""What a method gets of an image, and what it gives back.

Shapes as in `msdg_vllm.core`, and P = N * patches_per_token, the patches of the encoder. What
comes out of the encoder is per patch, what comes out of the projector per token; patches that
merge into one token are neighbours. Padding never gets this far: all tokens of an image are real.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from msdg_vllm.core.budget import validate_count
from msdg_vllm.methods.needs import Encoder


@dataclass(frozen=True, slots=True)
class Signals:
    """What the encoder gave, by layer; only what the method's `Needs` name is there.

    Attributes:
        states: The state that enters each layer, `(.., P, d)`.
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
    features: Tensor | None = None
    class_attention: Mapping[int, Tensor] = field(default_factory=dict)
    received_attention: Mapping[int, Tensor] = field(default_factory=dict)
    keys: Mapping[int, Tensor] = field(default_factory=dict)
    mlp_updates: Mapping[int, Tensor] = field(default_factory=dict)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Signals":
        """Return the signals with `function` applied to each tensor."""

        def mapped(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
            return {layer: function(tensor) for layer, tensor in tensors.items()}

        return Signals(
            states=mapped(self.states),
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
    """

    signals: Signals
    visual: Tensor
    encoder: Encoder
    query: Tensor | None = None
    grids: Sequence[tuple[int, int]] = ()
    seed: int = 0
    project: Callable[[Tensor], Tensor] | None = None

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.visual.shape[-2]

    def per_token(self, values: Tensor) -> Tensor:
        """Average values over the patches of each token, `(P, ..)` to `(N, ..)` in float32."""
        patches = self.encoder.patches_per_token
        values = values.float()
        return values if patches == 1 else values.unflatten(0, (-1, patches)).mean(dim=1)


@dataclass(frozen=True, slots=True)
class ImageBatch:
    """Images or tiles of one size that were encoded together: R rows.

    Attributes:
        signals: What the encoder gave, `(R, P, ..)`.
        visual: Projected tokens, `(R, N, D)`.
        encoder: Where the signals come from.
        grids: The grids of each row's real tokens.
        seeds: The seed of each row.
        places: Which tokens of each row are real, `(n,)` int64 ascending on the device of the
            signals, or None for all; the others are padding.
        project: As in `Image`.
    """

    signals: Signals
    visual: Tensor
    encoder: Encoder
    grids: Sequence[Sequence[tuple[int, int]]]
    seeds: Sequence[int]
    places: Sequence[Tensor | None]
    project: Callable[[Tensor], Tensor] | None = None

    @property
    def num_rows(self) -> int:
        """R."""
        return self.visual.shape[0]

    @property
    def valid(self) -> Tensor | None:
        """`(R, N)`, False for padding; None when there is none."""
        if all(places is None for places in self.places):
            return None
        mask = torch.ones(self.visual.shape[:2], dtype=torch.bool, device=self.visual.device)
        for row, places in zip(mask, self.places, strict=True):
            if places is not None:
                row.fill_(False).scatter_(0, places, True)
        return mask

    def image(self, row: int, query: Tensor | None) -> Image:
        """Return one row without its padding."""
        places = self.places[row]
        signals = self.signals.map(lambda tensor: tensor[row])
        visual = self.visual[row]
        if places is not None:
            patches = self.encoder.patches_per_token
            signals = signals.map(
                lambda tensor: tensor.unflatten(0, (-1, patches))[places].flatten(0, 1)
            )
            visual = visual[places]
        return Image(
            signals=signals,
            visual=visual,
            encoder=self.encoder,
            query=query,
            grids=self.grids[row],
            seed=self.seeds[row],
            project=self.project,
        )

    def take(self, rows: Sequence[int]) -> "ImageBatch":
        """Return some rows, ascending; the batch itself if they are all."""
        if len(rows) == self.num_rows:
            return self

        def taken(tensor: Tensor) -> Tensor:
            # Slices, because an index list would have to be copied to the device first.
            return torch.stack([tensor[row] for row in rows])

        return replace(
            self,
            signals=self.signals.map(taken),
            visual=taken(self.visual),
            grids=[self.grids[row] for row in rows],
            seeds=[self.seeds[row] for row in rows],
            places=[self.places[row] for row in rows],
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """What a method decided about one image.

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

"""Images that reach the encoder as several tiles: each tile is pruned by itself, all in one batch.

The alternative, scope `image`, is one run over the tokens of all tiles together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from msdg_vllm.core import (
    ImageSignals,
    TokenScores,
    analyze_image,
    num_kept_tokens,
    score_tokens,
    take_tokens,
)
from msdg_vllm.engine.embedding import EncodedImages, PruningModel
from msdg_vllm.engine.spec import PruningSpec
from msdg_vllm.profiles import EncoderProfile


@dataclass(frozen=True, slots=True, eq=False)
class TileLayout:
    """Which tokens of an image's tiles are real, and in which order the language model reads them.

    Attributes:
        tokens_per_tile: N.
        tile_sizes: Real tokens of each tile, at most N; the others are padding.
        order: Position of each real token among the tokens of all tiles, in reading order,
            `(sum of tile_sizes,)` int64 on the host.
    """

    tokens_per_tile: int
    tile_sizes: tuple[int, ...]
    order: torch.Tensor

    @classmethod
    def of_order(cls, order: torch.Tensor, num_tiles: int, tokens_per_tile: int) -> TileLayout:
        """The layout whose real tokens are those that `order` names."""
        sizes = torch.bincount(order // tokens_per_tile, minlength=num_tiles)
        return cls(tokens_per_tile, tuple(sizes.tolist()), order)

    @property
    def num_tiles(self) -> int:
        """Tiles of the image."""
        return len(self.tile_sizes)

    @property
    def num_tokens(self) -> int:
        """Real tokens of the image."""
        return sum(self.tile_sizes)

    def budget(self, retention: float) -> int:
        """Tokens to keep: the share of one tile for each tile, as far as there are real tokens."""
        share = num_kept_tokens(self.tokens_per_tile, retention)
        return min(share * self.num_tiles, self.num_tokens)

    def shares(self, budget: int) -> list[int]:
        """Part an image's budget into the budgets of its tiles.

        Equal parts; what a tile with too few real tokens cannot use goes, token by token, to
        the tile that has most of them left, the earlier one of equals.
        """
        shares = [min(budget // self.num_tiles, size) for size in self.tile_sizes]
        for _ in range(budget - sum(shares)):
            left = [size - share for size, share in zip(self.tile_sizes, shares, strict=True)]
            shares[left.index(max(left))] += 1
        return shares

    def valid(self) -> torch.Tensor:
        """`(tiles, N)` on the host, False for padding."""
        mask = torch.zeros(self.num_tiles * self.tokens_per_tile, dtype=torch.bool)
        mask[self.order] = True
        return mask.view(self.num_tiles, self.tokens_per_tile)


@dataclass(slots=True)
class EncodedTiles(EncodedImages):
    """Tiles of images, one row each, encoded together.

    Attributes:
        layouts: The layout of each image; image after image, tile after tile, they name the rows.
    """

    layouts: Sequence[TileLayout] = ()


class TiledPruningModel(PruningModel):
    """A pruned model whose `encode_items` gives `EncodedTiles`."""

    def num_tower_tokens(
        self, kwargs: Mapping[str, Any], modality: str, index: int, spec: PruningSpec
    ) -> int:
        layout = self.tile_layout(kwargs, index)
        return layout.num_tiles * layout.tokens_per_tile

    def tile_layout(self, kwargs: Mapping[str, Any], index: int) -> TileLayout:
        """The layout of an item, from what the host knows."""
        raise NotImplementedError

    def keep_tokens(
        self,
        images: EncodedImages,
        specs: Sequence[PruningSpec],
        queries: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        assert isinstance(images, EncodedTiles)
        positions = self.select_positions(images, specs, queries)
        tokens = images.visual.split([layout.num_tiles for layout in images.layouts])
        return [visual.flatten(0, 1)[kept] for visual, kept in zip(tokens, positions, strict=True)]

    def select_positions(
        self,
        images: EncodedTiles,
        specs: Sequence[PruningSpec],
        queries: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Choose tokens, as positions among those of each image's tiles, in reading order."""
        decisions = decide(images, specs, queries, self.profile)
        images.states.clear()
        positions = []
        first_tile = 0
        for layout, spec, decision in zip(images.layouts, specs, decisions, strict=False):
            order = _to_device(layout.order, images.visual)
            # A stable sort of a 0/1 key lists the kept tokens first, in reading order.
            dropped = ~decision.kept.flatten()[order]
            positions.append(order[dropped.to(torch.uint8).argsort(stable=True)[: spec.budget]])
            if spec.explanation and images.grid is not None:
                for tile in range(layout.num_tiles):
                    self.explain(
                        spec,
                        images.grid,
                        decision.kept[tile],
                        decision.signals[tile],
                        TokenScores(decision.scores.relevance[tile], decision.scores.score[tile]),
                        None if images.pixels is None else images.pixels[first_tile + tile],
                        tile,
                    )
            first_tile += layout.num_tiles
        return positions


@dataclass(frozen=True, slots=True)
class TileDecision:
    """What was decided about the tiles of one image; every tensor is `(tiles, N)`."""

    kept: torch.Tensor
    signals: ImageSignals
    scores: TokenScores


def decide(
    images: EncodedTiles,
    specs: Sequence[PruningSpec],
    queries: Sequence[torch.Tensor],
    profile: EncoderProfile,
) -> list[TileDecision]:
    """Decide which tokens of each image's tiles stay.

    Args:
        images: The tiles of all images.
        specs: What each image asks for; exactly `spec.budget` of its tokens are kept.
        queries: Query embeddings of each image, `(Q, D)`.
        profile: The settings for the encoder.
    """
    ends = list(accumulate(layout.num_tiles for layout in images.layouts))
    spans = [
        (end - layout.num_tiles, end) for end, layout in zip(ends, images.layouts, strict=True)
    ]
    decisions: dict[int, TileDecision] = {}
    per_tile = [i for i in range(len(spans)) if specs[i].scope == "tile"]
    if per_tile:
        chosen = _decide_per_tile(
            _rows(images, [spans[i] for i in per_tile]),
            [images.layouts[i] for i in per_tile],
            [specs[i] for i in per_tile],
            [queries[i] for i in per_tile],
            profile,
        )
        decisions.update(zip(per_tile, chosen, strict=True))
    for i, span in enumerate(spans):
        if specs[i].scope == "image":
            decisions[i] = _decide_as_one(
                _rows(images, [span]), images.layouts[i], specs[i], queries[i], profile
            )
    return [decisions[i] for i in range(len(spans))]


def _decide_per_tile(
    tiles: EncodedImages,
    layouts: Sequence[TileLayout],
    specs: Sequence[PruningSpec],
    queries: Sequence[torch.Tensor],
    profile: EncoderProfile,
) -> list[TileDecision]:
    """Run the method on every tile: one batch, but for questions and budgets that differ."""
    visual = tiles.visual
    valid = _to_device(torch.cat([layout.valid() for layout in layouts]), visual)
    signals = analyze_image(tiles.states, profile, valid=valid)
    counts = [layout.num_tiles for layout in layouts]
    images = _split(signals, counts)
    if len({spec.query_ids for spec in specs}) == 1:
        scores = score_tokens(signals, visual, queries[0])
    else:
        parts = [
            score_tokens(*image)
            for image in zip(images, visual.split(counts), queries, strict=True)
        ]
        scores = TokenScores(
            torch.cat([part.relevance for part in parts]), torch.cat([part.score for part in parts])
        )
    rows_of_share: defaultdict[int, list[int]] = defaultdict(list)
    shares = [
        s for layout, spec in zip(layouts, specs, strict=True) for s in layout.shares(spec.budget)
    ]
    for row, share in enumerate(shares):
        rows_of_share[share].append(row)
    kept = torch.zeros_like(valid)
    for share, rows in rows_of_share.items():
        if share == 0:
            continue
        if len(rows) == len(shares):
            kept.scatter_(1, take_tokens(signals, scores, share), True)
            continue
        batch = _to_device(torch.tensor(rows), visual)
        indices = take_tokens(
            _take(signals, batch),
            TokenScores(scores.relevance[batch], scores.score[batch]),
            share,
        )
        kept[batch] = kept[batch].scatter(1, indices, True)
    return [
        TileDecision(mask, image, TokenScores(relevance, score))
        for mask, image, relevance, score in zip(
            kept.split(counts),
            images,
            scores.relevance.split(counts),
            scores.score.split(counts),
            strict=True,
        )
    ]


def _decide_as_one(
    tiles: EncodedImages,
    layout: TileLayout,
    spec: PruningSpec,
    query: torch.Tensor,
    profile: EncoderProfile,
) -> TileDecision:
    """Run the method once, on the real tokens of all tiles in reading order."""
    order = _to_device(layout.order, tiles.visual)
    states = {n: state.flatten(0, 1)[order].unsqueeze(0) for n, state in tiles.states.items()}
    signals = analyze_image(states, profile)
    scores = score_tokens(signals, tiles.visual.flatten(0, 1)[order].unsqueeze(0), query)
    kept = torch.zeros_like(signals.sink_mask)
    kept.scatter_(1, take_tokens(signals, scores, spec.budget), True)

    def spread(values: torch.Tensor, padding: float) -> torch.Tensor:
        size = (layout.num_tiles * layout.tokens_per_tile,)
        spread_out = values.new_full(size, padding).scatter(0, order, values.squeeze(0))
        return spread_out.view(layout.num_tiles, layout.tokens_per_tile)

    return TileDecision(
        spread(kept, False),
        ImageSignals(
            saliency=spread(signals.saliency, 0.0),
            groups=spread(signals.groups, -1),
            num_groups=signals.num_groups.expand(layout.num_tiles),
            sink_mask=spread(signals.sink_mask, False),
            sink_activation=spread(signals.sink_activation, 0.0),
            max_groups=signals.max_groups,
        ),
        TokenScores(spread(scores.relevance, 0.0), spread(scores.score, 0.0)),
    )


def _rows(images: EncodedTiles, spans: Sequence[tuple[int, int]]) -> EncodedImages:
    """Some rows of a batch; the batch itself if they are all."""
    if sum(stop - start for start, stop in spans) == images.visual.shape[0]:
        return images

    def take(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[start:stop] for start, stop in spans])

    return EncodedImages(
        states={layer: take(state) for layer, state in images.states.items()},
        visual=take(images.visual),
    )


def _split(signals: ImageSignals, counts: Sequence[int]) -> list[ImageSignals]:
    ends = accumulate(counts)
    return [
        _take(signals, slice(end - count, end)) for end, count in zip(ends, counts, strict=True)
    ]


def _take(signals: ImageSignals, rows: slice | torch.Tensor) -> ImageSignals:
    return signals.map(lambda tensor: tensor[rows])


def _to_device(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return async_tensor_h2d(tensor, device=like.device)

"""Images that reach the encoder as several tiles: each tile is pruned by itself, all in one batch.

The alternative, scope `image`, is one run over the tokens of all tiles together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from msdg_vllm.core import num_kept_tokens
from msdg_vllm.engine.spec import PruningSpec
from msdg_vllm.engine.worker.choosing import Wish, choose_tokens
from msdg_vllm.engine.worker.model import EncodedImages, PruningModel
from msdg_vllm.methods import Choice, Encoder, ImageBatch


@dataclass(frozen=True, slots=True, eq=False)
class TileLayout:
    """Which tokens of an image's tiles are real, and in which order the language model reads them.

    Attributes:
        tokens_per_tile: N.
        tile_sizes: Real tokens of each tile, at most N; the others are padding.
        order: Position of each real token among the tokens of all tiles, in reading order,
            `(sum of tile_sizes,)` int64 on the host.
        grids: Rows and columns of the grids that the real tokens form in reading order, one
            after the other.
    """

    tokens_per_tile: int
    tile_sizes: tuple[int, ...]
    order: torch.Tensor
    grids: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_order(
        cls,
        order: torch.Tensor,
        num_tiles: int,
        tokens_per_tile: int,
        grids: tuple[tuple[int, int], ...] = (),
    ) -> TileLayout:
        """The layout whose real tokens are those that `order` names."""
        sizes = torch.bincount(order // tokens_per_tile, minlength=num_tiles)
        return cls(tokens_per_tile, tuple(sizes.tolist()), order, grids)

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

    def tile_grids(self) -> list[tuple[tuple[int, int], ...]]:
        """The grid of each tile's real tokens: padding is whole rows and columns at the edges."""
        side = math.isqrt(self.tokens_per_tile)
        grids: list[tuple[tuple[int, int], ...]] = []
        for tile in self.valid():
            num_rows = int(tile.view(side, -1).any(dim=1).sum())
            grids.append(((num_rows, int(tile.sum()) // num_rows),) if num_rows else ())
        return grids


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
        decisions = self.decide(images, specs, queries)
        tokens = images.visual.split([layout.num_tiles for layout in images.layouts])
        return [
            decision.tokens(visual.flatten(0, 1))
            for visual, decision in zip(tokens, decisions, strict=True)
        ]

    def decide(
        self,
        images: EncodedTiles,
        specs: Sequence[PruningSpec],
        queries: Sequence[torch.Tensor],
    ) -> list[TileDecision]:
        """Choose tokens of each image, and explain where that was asked for."""
        decisions = decide(images, specs, queries, self.encoder)
        first_tile = 0
        for layout, spec, decision in zip(images.layouts, specs, decisions, strict=False):
            if spec.explanation and images.grid is not None:
                for tile, choice in enumerate(decision.tiles):
                    self.explain(
                        spec,
                        images.grid,
                        choice,
                        None if images.pixels is None else images.pixels[first_tile + tile],
                        tile,
                    )
            first_tile += layout.num_tiles
        return decisions


@dataclass(frozen=True, slots=True)
class TileDecision:
    """What was decided about one image.

    Attributes:
        positions: Kept tokens as positions among those of all its tiles, in reading order, `(B,)`.
        tiles: The choice about each tile, for explanations; `indices` may be a mask.
        merged: What stands in the places of the kept tokens, `(B, D)`; None for the tokens as
            they are.
    """

    positions: torch.Tensor
    tiles: Sequence[Choice]
    merged: torch.Tensor | None

    def tokens(self, visual: torch.Tensor) -> torch.Tensor:
        """The kept rows of an image, `(B, D)`, given all tokens of its tiles, `(tiles * N, D)`."""
        return visual[self.positions] if self.merged is None else self.merged


def decide(
    images: EncodedTiles,
    specs: Sequence[PruningSpec],
    queries: Sequence[torch.Tensor],
    encoder: Encoder,
) -> list[TileDecision]:
    """Decide which tokens of each image's tiles stay.

    Args:
        images: The tiles of all images; their signals are taken from them.
        specs: What each image asks for; exactly `spec.budget` of its tokens are kept.
        queries: Query embeddings of each image, `(Q, D)`.
        encoder: Where the tiles were encoded.
    """
    layouts = images.layouts
    places = [_real_tokens(layout, images.visual) for layout in layouts]
    batch = ImageBatch(
        signals=images.pop_signals(),
        visual=images.visual,
        encoder=encoder,
        grids=[grids for layout in layouts for grids in layout.tile_grids()],
        seeds=[
            _tile_seed(spec.seed, tile)
            for layout, spec in zip(layouts, specs, strict=False)
            for tile in range(layout.num_tiles)
        ],
        places=[tile for tiles in places for tile in tiles],
        project=images.project,
    )
    ends = accumulate(layout.num_tiles for layout in layouts)
    rows = [range(end - layout.num_tiles, end) for end, layout in zip(ends, layouts, strict=True)]
    decisions = {
        i: _decide_as_one(batch.take(rows[i]), layouts[i], specs[i], queries[i])
        for i in range(len(layouts))
        if specs[i].scope == "image"
    }
    if per_tile := [i for i in range(len(layouts)) if i not in decisions]:
        batch = batch.take([row for i in per_tile for row in rows[i]])
        wishes = [
            Wish(specs[i].method, share, specs[i].query_ids, queries[i])
            for i in per_tile
            for share in layouts[i].shares(specs[i].budget)
        ]
        choices = iter(choose_tokens(batch, wishes))
        for i in per_tile:
            tiles = [next(choices) for _ in rows[i]]
            decisions[i] = _in_reading_order(tiles, layouts[i])
    return [decisions[i] for i in range(len(layouts))]


def _in_reading_order(tiles: Sequence[Choice], layout: TileLayout) -> TileDecision:
    """Join the choices about the tiles of one image."""
    positions = torch.cat(
        [choice.indices + tile * layout.tokens_per_tile for tile, choice in enumerate(tiles)]
    )
    # Where each position stands in the order of reading.
    place = torch.empty(layout.num_tiles * layout.tokens_per_tile, dtype=torch.int64)
    place[layout.order] = torch.arange(len(layout.order))
    by_reading = _to_device(place, positions)[positions].argsort()
    merged = [choice.embeddings for choice in tiles if choice.embeddings is not None]
    return TileDecision(
        positions[by_reading], tiles, torch.cat(merged)[by_reading] if merged else None
    )


def _decide_as_one(
    tiles: ImageBatch, layout: TileLayout, spec: PruningSpec, query: torch.Tensor
) -> TileDecision:
    """Ask the method once, about the real tokens of all tiles in reading order."""
    order = _to_device(layout.order, tiles.visual)

    def joined(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten(0, 1)[order].unsqueeze(0)

    image = replace(
        tiles,
        signals=tiles.signals.map(joined),
        visual=joined(tiles.visual),
        grids=[layout.grids],
        seeds=tiles.seeds[:1],
        places=[None],
    )
    wish = Wish(spec.method, spec.budget, spec.query_ids, query)
    (choice,) = choose_tokens(image, [wish])

    def spread(values: torch.Tensor | None, padding: float) -> Sequence[torch.Tensor | None]:
        if values is None:
            return [None] * layout.num_tiles
        size = (layout.num_tiles * layout.tokens_per_tile,)
        spread_out = values.new_full(size, padding).scatter(0, order, values)
        return spread_out.view(layout.num_tiles, layout.tokens_per_tile).unbind()

    kept = torch.zeros_like(order, dtype=torch.bool).scatter(0, choice.indices, True)
    return TileDecision(
        order[choice.indices],
        [
            Choice(mask, scores=scores, groups=groups, sinks=sinks)
            for mask, scores, groups, sinks in zip(
                spread(kept, False),
                spread(choice.scores, 0.0),
                spread(choice.groups, -1),
                spread(choice.sinks, False),
                strict=True,
            )
            if mask is not None
        ],
        choice.embeddings,
    )


def _real_tokens(layout: TileLayout, like: torch.Tensor) -> list[torch.Tensor | None]:
    """Which tokens of each tile are real; None for all."""
    if layout.num_tokens == layout.num_tiles * layout.tokens_per_tile:
        return [None] * layout.num_tiles
    places = [tile.nonzero().flatten() for tile in layout.valid()]
    on_device = _to_device(torch.cat(places), like).split(list(layout.tile_sizes))
    return [
        None if size == layout.tokens_per_tile else tile
        for size, tile in zip(layout.tile_sizes, on_device, strict=True)
    ]


def _tile_seed(seed: int, tile: int) -> int:
    return (seed + tile * 0x9E3779B97F4A7C15) % 2**63


def _to_device(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return async_tensor_h2d(tensor, device=like.device)

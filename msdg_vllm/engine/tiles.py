"""Images that reach the encoder as several tiles: each tile is pruned by itself, all in one batch.

The alternative, scope `image`, is one run over the tokens of all tiles together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from msdg_vllm.core import ImageSignals, analyze_image, num_kept_tokens, select_tokens
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
        count = len(images.layouts)
        chosen = select_tile_tokens(
            images, images.layouts, specs[:count], queries[:count], self.profile
        )
        visual = images.visual.split([layout.num_tiles for layout in images.layouts])
        return [
            tokens.flatten(0, 1)[indices] for tokens, indices in zip(visual, chosen, strict=True)
        ]


def select_tile_tokens(
    tiles: EncodedImages,
    layouts: Sequence[TileLayout],
    specs: Sequence[PruningSpec],
    queries: Sequence[torch.Tensor],
    profile: EncoderProfile,
) -> list[torch.Tensor]:
    """Choose each image's tokens, as positions among the tokens of its tiles, in reading order.

    Args:
        tiles: The tiles of all images, one row each.
        layouts: The layout of each image.
        specs: What each image asks for.
        queries: Query embeddings of each image, `(Q, D)`.
        profile: The settings for the encoder.

    Returns:
        One int64 tensor per image, of exactly `spec.budget` positions.
    """
    device = tiles.visual.device
    orders = [async_tensor_h2d(layout.order, device=device) for layout in layouts]
    starts = _starts([layout.num_tiles for layout in layouts])
    chosen: list[torch.Tensor | None] = [None] * len(specs)

    per_tile = [i for i, spec in enumerate(specs) if spec.scope == "tile"]
    if per_tile:
        kept = _select_per_tile(
            _rows_of(tiles, [(starts[i], starts[i + 1]) for i in per_tile]),
            [layouts[i] for i in per_tile],
            [specs[i] for i in per_tile],
            [queries[i] for i in per_tile],
            profile,
        )
        for i, mask in zip(per_tile, kept, strict=True):
            # A stable sort of a 0/1 key lists the kept tokens first, in reading order.
            first = (~mask[orders[i]]).to(torch.uint8).argsort(stable=True)
            chosen[i] = orders[i][first[: specs[i].budget]]

    for i, spec in enumerate(specs):
        if spec.scope == "image":
            whole = _rows_of(tiles, [(starts[i], starts[i + 1])])
            states = {n: state.flatten(0, 1)[orders[i]] for n, state in whole.states.items()}
            visual = whole.visual.flatten(0, 1)[orders[i]]
            signals = analyze_image(states, profile)
            chosen[i] = orders[i][select_tokens(signals, visual, queries[i], spec.budget)]
    return [indices for indices in chosen if indices is not None]


def _select_per_tile(
    tiles: EncodedImages,
    layouts: Sequence[TileLayout],
    specs: Sequence[PruningSpec],
    queries: Sequence[torch.Tensor],
    profile: EncoderProfile,
) -> list[torch.Tensor]:
    """Masks of the kept tokens of each image, `(tiles * N,)`: one analysis for all tiles."""
    num_rows, num_tokens = tiles.visual.shape[:2]
    valid = async_tensor_h2d(
        torch.cat([layout.valid() for layout in layouts]), device=tiles.visual.device
    )
    signals = analyze_image(tiles.states, profile, valid=valid)
    # Tiles with the same question and the same budget are one batch, whichever image they are of.
    batches: defaultdict[tuple[tuple[int, ...], int], list[int]] = defaultdict(list)
    query_of = {}
    row = 0
    for layout, spec, query in zip(layouts, specs, queries, strict=True):
        query_of[spec.query_ids] = query
        for share in layout.shares(spec.budget):
            batches[spec.query_ids, share].append(row)
            row += 1
    kept = torch.zeros_like(valid)
    for (query_ids, share), rows in batches.items():
        if share == 0:
            continue
        query = query_of[query_ids]
        if len(rows) == num_rows:
            indices = select_tokens(signals, tiles.visual, query, share)
            kept.scatter_(1, indices, True)
            continue
        batch = async_tensor_h2d(rows, device=valid.device, dtype=torch.int64)
        indices = select_tokens(
            _take(signals, batch), tiles.visual.index_select(0, batch), query, share
        )
        kept.view(-1).index_fill_(0, (indices + batch.unsqueeze(-1) * num_tokens).view(-1), True)
    return list(kept.view(-1).split([layout.num_tiles * num_tokens for layout in layouts]))


def _take(signals: ImageSignals, rows: torch.Tensor) -> ImageSignals:
    return signals.map(lambda tensor: tensor.index_select(0, rows))


def _rows_of(tiles: EncodedImages, spans: Sequence[tuple[int, int]]) -> EncodedImages:
    """Some rows of a batch; the batch itself if they are all."""
    if sum(stop - start for start, stop in spans) == tiles.visual.shape[0]:
        return tiles

    def take(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[start:stop] for start, stop in spans])

    return EncodedImages(
        states={layer: take(state) for layer, state in tiles.states.items()},
        visual=take(tiles.visual),
    )


def _starts(lengths: Iterable[int]) -> list[int]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts

"""How an image reaches the encoder: as one tile, or cut into several that are partly padding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from msdg_vllm.core import num_kept_tokens


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

    @classmethod
    def of_squares(cls, num_tiles: int, tokens_per_tile: int) -> TileLayout:
        """The layout of square tiles without padding, read one after the other."""
        side = math.isqrt(tokens_per_tile)
        order = torch.arange(num_tiles * tokens_per_tile)
        return cls.of_order(order, num_tiles, tokens_per_tile, ((side, side),) * num_tiles)

    @classmethod
    def of_one_tile(cls, grids: tuple[tuple[int, int], ...]) -> TileLayout:
        """The layout of an image that the encoder sees whole: one grid, or one for each frame."""
        num_tokens = sum(rows * columns for rows, columns in grids)
        return cls(num_tokens, (num_tokens,), torch.arange(num_tokens), grids)

    @property
    def is_one_tile(self) -> bool:
        """Whether the tokens of the encoder are those of the image, in order."""
        return self.num_tiles == 1 and self.num_tokens == self.tokens_per_tile

    @property
    def num_tiles(self) -> int:
        """Tiles of the image."""
        return len(self.tile_sizes)

    @property
    def num_tokens(self) -> int:
        """Real tokens of the image."""
        return sum(self.tile_sizes)

    @property
    def num_places(self) -> int:
        """Tokens of all tiles, padding included."""
        return self.num_tiles * self.tokens_per_tile

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
        mask = torch.zeros(self.num_places, dtype=torch.bool)
        mask[self.order] = True
        return mask.view(self.num_tiles, self.tokens_per_tile)

    @property
    def tile_grid(self) -> tuple[int, int]:
        """Rows and columns of a tile with its padding; frames one below the other."""
        if self.is_one_tile and self.grids:
            return sum(rows for rows, _ in self.grids), self.grids[0][1]
        side = math.isqrt(self.tokens_per_tile)
        return side, self.tokens_per_tile // side

    def tile_grids(self) -> list[tuple[tuple[int, int], ...]]:
        """The grid of each tile's real tokens: padding is whole rows and columns at the edges."""
        if self.is_one_tile:
            return [self.grids]
        grids: list[tuple[tuple[int, int], ...]] = []
        for tile in self.valid().view(self.num_tiles, *self.tile_grid):
            num_rows = int(tile.any(dim=1).sum())
            grids.append(((num_rows, int(tile.sum()) // num_rows),) if num_rows else ())
        return grids

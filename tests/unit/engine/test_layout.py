"""Layouts of tiled images: budgets, shares, padding, order and grids."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msdg_vllm.engine.layout import TileLayout
from msdg_vllm.models.llava_next import layout_of

PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def next_config(side: int = 24) -> Any:
    vision_config = SimpleNamespace(image_size=14 * side, patch_size=14)
    scale = 14 * side / 336
    pinpoints = [[int(height * scale), int(width * scale)] for height, width in PINPOINTS]
    return SimpleNamespace(vision_config=vision_config, image_grid_pinpoints=pinpoints)


@pytest.mark.parametrize(("retention", "budget"), [(0.056, 160), (0.111, 320), (0.222, 640)])
@pytest.mark.parametrize("size", [(480, 640), (672, 672), (2000, 3000)])
def test_five_tiles_have_the_budgets_of_the_paper(
    retention: float, budget: int, size: tuple[int, int]
) -> None:
    assert layout_of(next_config(), *size).budget(retention) == budget


def test_the_canvas_is_read_across_its_tiles() -> None:
    layout = layout_of(next_config(side=2), 56, 56)  # 2 x 2 tiles of 2 x 2 tokens
    assert layout.order.tolist() == [
        *(0, 1, 2, 3),  # the base tile
        *(4, 5, 8, 9),  # the upper rows of the upper tiles
        *(6, 7, 10, 11),
        *(12, 13, 16, 17),
        *(14, 15, 18, 19),
    ]


def test_padding_is_no_part_of_the_layout() -> None:
    layout = layout_of(next_config(), 30, 1000)
    assert layout.tile_sizes == (576, 48, 48, 48)
    assert layout.num_tokens == 720 == layout.budget(1.0)
    assert layout.valid().sum(dim=1).tolist() == [576, 48, 48, 48]


@pytest.mark.parametrize(
    ("sizes", "budget", "shares"),
    [
        ((576, 48, 48, 48), 256, [112, 48, 48, 48]),
        ((576, 336, 576, 336), 1384, [356, 336, 356, 336]),
        ((576, 0), 128, [128, 0]),
        ((10, 4, 9), 18, [8, 4, 6]),
        ((10, 4, 9), 23, [10, 4, 9]),
        ((5, 5, 5), 7, [3, 2, 2]),
    ],
)
def test_what_a_tile_cannot_use_goes_where_most_is_left(
    sizes: tuple[int, ...], budget: int, shares: list[int]
) -> None:
    assert TileLayout(576, sizes, torch.arange(0)).shares(budget) == shares


@given(st.data())
def test_shares_add_up_and_fit(data: st.DataObject) -> None:
    sizes = tuple(data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any)))
    budget = data.draw(st.integers(1, sum(sizes)))
    shares = TileLayout(30, sizes, torch.arange(0)).shares(budget)
    assert sum(shares) == budget
    assert all(0 <= share <= size for share, size in zip(shares, sizes, strict=True))
    # No tile gets more than its part while another that could use it gets less than its own.
    part = budget // len(sizes)
    assert all(share >= min(part, size) for share, size in zip(shares, sizes, strict=True))


def test_grids_are_those_of_the_real_tokens() -> None:
    layout = layout_of(next_config(), 30, 1000)
    assert layout.tile_grids() == [((24, 24),), ((2, 24),), ((2, 24),), ((2, 24),)]
    assert layout.grids == ((24, 24), (2, 72))
    empty = TileLayout.of_order(torch.arange(36), 2, 36)
    assert empty.tile_grids() == [((6, 6),), ()]


def test_an_image_that_is_seen_whole_is_one_tile() -> None:
    video = TileLayout.of_one_tile(((2, 3),) * 4)
    assert video.is_one_tile
    assert (video.num_tiles, video.num_tokens, video.tile_grid) == (1, 24, (8, 3))
    assert video.tile_grids() == [video.grids]
    assert video.shares(7) == [7]
    assert not layout_of(next_config(), 30, 1000).is_one_tile
    assert not TileLayout.of_order(torch.arange(30), 1, 36).is_one_tile

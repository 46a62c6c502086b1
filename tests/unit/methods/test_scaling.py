"""Pooling, and the size an image is scaled to."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from msdg_vllm.methods import Encoder, Image, Needs, Signals, method_named
from msdg_vllm.methods.resize import scaled_grid
from tests.method_references.scaling import pool_reference, scaled_grid_reference
from tests.unit.methods.cases import array, make_image

ANY_SIZE = Encoder(num_layers=6, profile=None, has_class_token=False, free_resolution=True)
ONE_SIZE = replace(ANY_SIZE, free_resolution=False)
sides = st.integers(1, 30)


def picture(*grids: tuple[int, int], width: int = 5) -> Image:
    num_tokens = sum(rows * columns for rows, columns in grids)
    visual = torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(3))
    return Image(Signals(), visual, ONE_SIZE, grids=grids)


@settings(max_examples=60, deadline=None)
@given(grids=st.lists(st.tuples(sides, sides), min_size=1, max_size=4), data=st.data())
def test_pooled_tokens_are_those_of_the_reference(
    grids: list[tuple[int, int]], data: st.DataObject
) -> None:
    image = picture(*grids)
    budget = data.draw(st.integers(1, image.num_tokens))
    choice = method_named("pool").select(image, budget)
    expected = pool_reference(array(image.visual), grids, budget)
    assert choice.indices.tolist() == expected.keep
    assert choice.embeddings is not None
    rows = torch.stack([torch.from_numpy(row) for row in expected.rows]).float()
    torch.testing.assert_close(choice.embeddings, rows, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("side", "cells"), [(24, 8), (24, 12), (12, 4), (16, 16), (16, 1)])
def test_a_square_that_divides_evenly_is_pooled_as_torch_does(side: int, cells: int) -> None:
    image = picture((side, side))
    choice = method_named("pool").select(image, cells * cells)
    squares = image.visual.T.view(1, -1, side, side)
    pooled = F.adaptive_avg_pool2d(squares, cells)[0].flatten(1).T
    assert choice.embeddings is not None
    torch.testing.assert_close(choice.embeddings, pooled)


def test_pooling_names_the_cell_of_each_token() -> None:
    image = picture((4, 6), (4, 6))
    choice = method_named("pool").select(image, 12)
    assert choice.groups is not None
    assert choice.embeddings is not None
    for cell in range(12):
        members = image.visual[choice.groups == cell]
        torch.testing.assert_close(members.mean(dim=0), choice.embeddings[cell])
    # Of three frames two have a cell; the tokens of the other belong to none.
    few = method_named("pool").select(picture((2, 2), (2, 2), (2, 2)), 2)
    assert few.groups is not None
    assert few.groups.tolist() == [-1] * 4 + [0] * 4 + [1] * 4


def test_pooling_leaves_out_what_is_not_finite() -> None:
    image = make_image(4, "broken", num_tokens=36)
    assert not image.visual.isfinite().all()
    for budget in (4, 18, 36):
        choice = method_named("pool").select(image, budget)
        assert choice.embeddings is not None
        assert choice.embeddings.isfinite().all()


@settings(max_examples=200, deadline=None)
@given(rows=sides, columns=sides, data=st.data())
def test_an_image_is_scaled_to_the_largest_grid_of_its_shape(
    rows: int, columns: int, data: st.DataObject
) -> None:
    most = data.draw(st.integers(1, rows * columns))
    grid = scaled_grid(rows, columns, most)
    assert grid == scaled_grid_reference(rows, columns, most)
    assert grid[0] * grid[1] <= most


@pytest.mark.parametrize(
    ("grid", "most", "scaled"),
    [((24, 24), 64, (8, 8)), ((12, 16), 21, (4, 5)), ((1, 50), 7, (1, 7)), ((9, 9), 81, (9, 9))],
)
def test_known_sizes(grid: tuple[int, int], most: int, scaled: tuple[int, int]) -> None:
    assert scaled_grid(*grid, most) == scaled


def test_resizing_asks_for_the_budget_and_half_of_the_saving() -> None:
    assert method_named("resize").encoder_tokens(576, 64) == 64
    assert method_named("resize+msdg").encoder_tokens(576, 64) == 192
    assert method_named("msdg").encoder_tokens(576, 64) == 576


@pytest.mark.parametrize("name", ["resize", "resize+msdg"])
def test_an_encoder_of_one_size_cannot_be_fed_smaller_images(name: str) -> None:
    encoder = make_image(0, "random").encoder
    missing = method_named(name).unmet_need(encoder)
    assert missing is not None
    assert "takes them at one (try 'pool')" in missing
    assert method_named(name).unmet_need(replace(encoder, free_resolution=True)) is None


def test_pooling_makes_tokens_of_several() -> None:
    assert method_named("pool").needs(ONE_SIZE) == Needs(visual=True, merging=True)
    missing = method_named("pool").unmet_need(replace(ONE_SIZE, num_levels=3))
    assert missing is not None
    assert "when it merges tokens" in missing

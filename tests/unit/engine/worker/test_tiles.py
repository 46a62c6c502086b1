"""Layouts of tiled images, and decisions over batches of tiles against the literal reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msdg_vllm.core.profiles import EncoderProfile
from msdg_vllm.engine.spec import PruningSpec
from msdg_vllm.engine.worker.explanations import ExplanationStore
from msdg_vllm.engine.worker.tiles import EncodedTiles, TiledPruningModel, TileLayout, decide
from msdg_vllm.methods import Encoder, Image, Signals, method_named
from msdg_vllm.models.llava_next import layout_of
from tests.reference import select_reference

PROFILE = EncoderProfile(
    direction_layers=(0, 3),
    saliency_window=(1, 2),
    sink_layer=1,
    sink_coordinate=2,
    sink_threshold=1.5,
    num_groups=4,
)
ENCODER = Encoder(num_layers=3, profile=PROFILE)
PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def next_config(side: int = 24) -> Any:
    vision_config = SimpleNamespace(image_size=14 * side, patch_size=14)
    scale = 14 * side / 336
    pinpoints = [[int(height * scale), int(width * scale)] for height, width in PINPOINTS]
    return SimpleNamespace(vision_config=vision_config, image_grid_pinpoints=pinpoints)


def whole_tiles(num_tiles: int, num_tokens: int) -> TileLayout:
    return TileLayout.of_order(torch.arange(num_tiles * num_tokens), num_tiles, num_tokens)


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


def encoded(layouts: list[TileLayout], seed: int = 0) -> EncodedTiles:
    generator = torch.Generator().manual_seed(seed)
    rows, num_tokens = sum(layout.num_tiles for layout in layouts), layouts[0].tokens_per_tile
    return EncodedTiles(
        signals=Signals(
            states={n: torch.randn(rows, num_tokens, 16, generator=generator) for n in range(4)}
        ),
        visual=torch.randn(rows, num_tokens, 16, generator=generator),
        layouts=layouts,
    )


def test_decisions_equal_the_reference_tile_by_tile() -> None:
    config = next_config(side=6)
    layouts = [layout_of(config, 480, 640), layout_of(config, 30, 1000), layout_of(config, 84, 84)]
    images = encoded(layouts)
    queries = [torch.randn(3, 16), torch.randn(5, 16), torch.zeros(0, 16)]
    specs = [
        PruningSpec(budget=40, num_tokens=0, query_ids=(1, 2, 3)),
        PruningSpec(budget=30, num_tokens=0, query_ids=(4, 5, 6, 7, 8)),
        PruningSpec(budget=25, num_tokens=0, scope="image"),
    ]
    states = images.signals.states
    first, second, third = decide(images, specs, queries, ENCODER)
    start = 0
    for decision, layout, spec, query in zip(
        (first, second), layouts, specs, queries, strict=False
    ):
        shares = layout.shares(spec.budget)
        assert [len(choice.indices) for choice in decision.tiles] == shares
        for tile, share in enumerate(shares):
            if share:
                expected = select_reference(
                    {n: states[n][start + tile].numpy() for n in PROFILE.layers},
                    images.visual[start + tile].numpy(),
                    query.numpy(),
                    share,
                    PROFILE,
                    valid=layout.valid()[tile].numpy(),
                )
                assert decision.tiles[tile].indices.tolist() == expected.keep
        start += layout.num_tiles
    order = layouts[2].order
    expected = select_reference(
        {n: states[n][start:].flatten(0, 1)[order].numpy() for n in PROFILE.layers},
        images.visual[start:].flatten(0, 1)[order].numpy(),
        queries[2].numpy(),
        25,
        PROFILE,
    )
    assert third.positions.tolist() == order[expected.keep].tolist()
    assert expected.sinks  # the case has sinks
    assert len(third.positions) == 25


def test_a_decision_does_not_depend_on_the_images_beside_it() -> None:
    layouts = [whole_tiles(2, 36), whole_tiles(5, 36), whole_tiles(1, 36)]
    images = encoded(layouts, seed=3)
    queries = [torch.randn(4, 16), torch.randn(2, 16), torch.randn(7, 16)]
    specs = [
        PruningSpec(budget=12, num_tokens=0, query_ids=(1,)),
        PruningSpec(budget=30, num_tokens=0, query_ids=(2,)),
        PruningSpec(budget=9, num_tokens=0, query_ids=(3,)),
    ]
    states = images.signals.states
    together = decide(images, specs, queries, ENCODER)
    start = 0
    for index, layout in enumerate(layouts):
        rows = slice(start, start + layout.num_tiles)
        alone = EncodedTiles(
            signals=Signals(states={n: state[rows] for n, state in states.items()}),
            visual=images.visual[rows],
            layouts=[layout],
        )
        (decision,) = decide(alone, [specs[index]], [queries[index]], ENCODER)
        assert torch.equal(decision.positions, together[index].positions)
        for tile, other in zip(decision.tiles, together[index].tiles, strict=True):
            assert tile.scores is not None
            assert other.scores is not None
            assert torch.equal(tile.scores, other.scores)
        start += layout.num_tiles


def test_tiles_of_a_merging_method_are_read_in_order_with_what_was_merged() -> None:
    layout = layout_of(next_config(side=6), 480, 640)
    images = encoded([layout], seed=5)
    generator = torch.Generator().manual_seed(6)
    attention = torch.rand(layout.num_tiles, 36, generator=generator)
    keys = torch.randn(layout.num_tiles, 36, 4, generator=generator)
    features = torch.randn(layout.num_tiles, 36, 16, generator=generator)
    images.signals = Signals(features=features, class_attention={2: attention}, keys={2: keys})
    images.project = lambda rows: 2 * rows
    spec = PruningSpec(budget=40, num_tokens=0, method="visionzip")
    (decision,) = decide(images, [spec], [torch.zeros(0, 16)], ENCODER)
    expected: dict[int, torch.Tensor] = {}
    for tile, (share, is_real) in enumerate(zip(layout.shares(40), layout.valid(), strict=True)):
        real = is_real.nonzero().flatten()
        image = Image(
            Signals(
                features=features[tile, real],
                class_attention={2: attention[tile, real]},
                keys={2: keys[tile, real]},
            ),
            images.visual[tile, real],
            ENCODER,
            project=images.project,
        )
        choice = method_named("visionzip").select(image, share)
        assert choice.embeddings is not None
        places = (36 * tile + real[choice.indices]).tolist()
        expected.update(zip(places, choice.embeddings, strict=True))
    in_order = [position for position in layout.order.tolist() if position in expected]
    assert decision.positions.tolist() == in_order
    rows = decision.tokens(images.visual.flatten(0, 1))
    assert torch.equal(rows, torch.stack([expected[position] for position in in_order]))


def test_grids_are_those_of_the_real_tokens() -> None:
    layout = layout_of(next_config(), 30, 1000)
    assert layout.tile_grids() == [((24, 24),), ((2, 24),), ((2, 24),), ((2, 24),)]
    assert layout.grids == ((24, 24), (2, 72))
    empty = TileLayout.of_order(torch.arange(36), 2, 36)
    assert empty.tile_grids() == [((6, 6),), ()]


@pytest.mark.parametrize("scope", ["tile", "image"])
def test_kept_rows_and_explanations_tell_of_the_same_tokens(scope: str) -> None:
    layout = layout_of(next_config(side=6), 480, 640)
    images = encoded([layout], seed=4)
    images.grids = ((6, 6),)
    tokens = images.visual.flatten(0, 1)
    model = object.__new__(TiledPruningModel)
    model.encoder = ENCODER
    model.explanations = ExplanationStore()
    model.pixel_statistics = None, None
    spec = PruningSpec(budget=40, num_tokens=0, scope=scope, explanation=7)
    (rows,) = model.keep_tokens(images, [spec], [torch.randn(3, 16)])
    explained = model.explanations.get(7)
    assert explained is not None
    assert [tile["tile"] for tile in explained] == [0, 1, 2, 3, 4]
    kept = {36 * tile["tile"] + token for tile in explained for token in tile["kept"]}
    in_order = [position for position in layout.order.tolist() if position in kept]
    assert len(in_order) == len(kept) == 40
    assert torch.equal(rows, tokens[in_order])
    for tile in explained:
        assert -1 not in tile["groups"] or tile["sinks"]

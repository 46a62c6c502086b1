"""Selections from batches of tiles against the literal reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from msdg_vllm.core.profiles import EncoderProfile
from msdg_vllm.engine.layout import TileLayout
from msdg_vllm.engine.spec import PruningSpec
from msdg_vllm.engine.worker.explanations import ExplanationStore
from msdg_vllm.engine.worker.image_store import ImageStore, SelectionMemory
from msdg_vllm.engine.worker.model import PruningModel
from msdg_vllm.engine.worker.selection import (
    EncodedImage,
    analyze_images,
    encoded_images,
    select_analyzed,
)
from msdg_vllm.engine.worker.statistics import PruningStatistics
from msdg_vllm.methods import Encoder, Image, Selection, Signals, method_named
from msdg_vllm.models.llava_next import layout_of
from tests.reference import select_reference
from tests.unit.engine.test_layout import next_config

PROFILE = EncoderProfile(
    direction_layers=(0, 3),
    saliency_window=(1, 2),
    sink_layer=1,
    sink_coordinate=2,
    sink_threshold=1.5,
    num_groups=4,
)
ENCODER = Encoder(num_layers=3, profile=PROFILE)


def select_tokens(images: Any, specs: Any, queries: Any) -> list[Selection]:
    return select_analyzed(analyze_images(images, specs, ENCODER), specs, queries)


def whole_tiles(num_tiles: int, num_tokens: int) -> TileLayout:
    return TileLayout.of_order(torch.arange(num_tiles * num_tokens), num_tiles, num_tokens)


def encoded(layouts: list[TileLayout], seed: int = 0) -> list[EncodedImage]:
    generator = torch.Generator().manual_seed(seed)
    rows, num_tokens = sum(layout.num_tiles for layout in layouts), layouts[0].tokens_per_tile
    signals = Signals(
        states={n: torch.randn(rows, num_tokens, 16, generator=generator) for n in range(4)}
    )
    visual = torch.randn(rows, num_tokens, 16, generator=generator)
    return encoded_images(signals, visual, layouts, torch.zeros(rows, 3, 6, 6), lambda x: x)


def indices_by_tile(indices: torch.Tensor, layout: TileLayout) -> list[list[int]]:
    """What was kept of each tile, ascending."""
    kept = torch.zeros(layout.num_tiles * layout.tokens_per_tile, dtype=torch.bool)
    kept[indices] = True
    tiles = kept.view(layout.num_tiles, -1)
    return [tile.nonzero().flatten().tolist() for tile in tiles]


def test_selections_equal_the_reference_tile_by_tile() -> None:
    config = next_config(side=6)
    layouts = [layout_of(config, 480, 640), layout_of(config, 30, 1000), layout_of(config, 84, 84)]
    images = encoded(layouts)
    queries = [torch.randn(3, 16), torch.randn(5, 16), None]
    specs = [
        PruningSpec(budget=40, num_tokens=0, query_ids=(1, 2, 3)),
        PruningSpec(budget=30, num_tokens=0, query_ids=(4, 5, 6, 7, 8)),
        PruningSpec(budget=25, num_tokens=0, scope="image"),
    ]
    first, second, third = select_tokens(images, specs, queries)
    for selection, image, spec, query in zip((first, second), images, specs, queries, strict=False):
        assert query is not None
        layout, states = image.layout, image.signals.states
        shares = layout.shares(spec.budget)
        tiles = indices_by_tile(selection.indices, layout)
        assert [len(indices) for indices in tiles] == shares
        for tile, share in enumerate(shares):
            if share:
                expected = select_reference(
                    {n: states[n][tile].numpy() for n in PROFILE.layers},
                    image.visual[tile].numpy(),
                    query.numpy(),
                    share,
                    PROFILE,
                    valid=layout.valid()[tile].numpy(),
                )
                assert tiles[tile] == expected.keep
        place = layout.order.tolist().index
        assert selection.indices.tolist() == sorted(selection.indices.tolist(), key=place)
    order, states = layouts[2].order, images[2].signals.states
    expected = select_reference(
        {n: states[n].flatten(0, 1)[order].numpy() for n in PROFILE.layers},
        images[2].visual.flatten(0, 1)[order].numpy(),
        torch.zeros(0, 16).numpy(),
        25,
        PROFILE,
    )
    assert third.indices.tolist() == order[expected.keep].tolist()
    assert expected.sinks  # the case has sinks
    assert len(third.indices) == 25


def test_a_selection_does_not_depend_on_the_images_beside_it() -> None:
    layouts = [whole_tiles(2, 36), whole_tiles(5, 36), whole_tiles(1, 36)]
    images = encoded(layouts, seed=3)
    queries = [torch.randn(4, 16), torch.randn(2, 16), torch.randn(7, 16)]
    specs = [
        PruningSpec(budget=12, num_tokens=0, query_ids=(1,), explanation=1),
        PruningSpec(budget=30, num_tokens=0, query_ids=(2,), explanation=1),
        PruningSpec(budget=9, num_tokens=0, query_ids=(3,), explanation=1),
    ]
    together = select_tokens(images, specs, queries)
    for image, spec, query, other in zip(images, specs, queries, together, strict=True):
        (selection,) = select_tokens([image], [spec], [query])
        assert torch.equal(selection.indices, other.indices)
        assert selection.scores is not None
        assert other.scores is not None
        assert selection.scores.shape == (image.layout.num_tiles * 36,)
        assert torch.equal(selection.scores, other.scores)


def test_an_analysed_image_answers_every_question_without_its_states() -> None:
    images = encoded([layout_of(next_config(side=6), 480, 640)], seed=8)
    queries = [torch.randn(3, 16), torch.randn(2, 16), None]
    specs = [PruningSpec(budget=budget, num_tokens=0) for budget in (40, 7, 90)]
    expected = [
        select_tokens(images, [spec], [query])[0]
        for spec, query in zip(specs, queries, strict=True)
    ]
    analyzed = analyze_images(images, specs[:1], ENCODER)
    for state in images[0].signals.states.values():
        state.fill_(torch.nan)
    selections = select_analyzed(analyzed * 3, specs, queries)
    for selection, other in zip(selections, expected, strict=True):
        assert torch.equal(selection.indices, other.indices)


def test_images_of_one_batch_are_selected_from_by_their_own_methods() -> None:
    images = encoded([TileLayout.of_one_tile(((6, 6),))] * 3, seed=9)
    queries = [torch.randn(3, 16), None, None]
    specs = [
        PruningSpec(budget=9, num_tokens=36, query_ids=(1, 2, 3)),
        PruningSpec(budget=5, num_tokens=36, method="random", seed=12),
        PruningSpec(budget=4, num_tokens=36),
    ]
    selections = select_tokens(images, specs, queries)
    for image, spec, query, selection in zip(images, specs, queries, selections, strict=True):
        alone = Image(
            image.signals.map(lambda tensor: tensor[0]),
            image.visual[0],
            ENCODER,
            query=query,
            seed=spec.seed,
        )
        expected = method_named(spec.method).select(alone, spec.budget)
        assert torch.equal(selection.indices, expected.indices)


@pytest.mark.parametrize("method", ["msdg", "random"])
def test_a_tile_without_real_tokens_keeps_none(method: str) -> None:
    images = encoded([TileLayout.of_order(torch.arange(36), 2, 36)])
    spec = PruningSpec(budget=3, num_tokens=0, method=method, explanation=1)
    (selection,) = select_tokens(images, [spec], [None])
    assert len(selection.indices) == 3
    assert indices_by_tile(selection.indices, images[0].layout)[1] == []
    if selection.scores is not None:
        assert selection.scores[36:].tolist() == [0.0] * 36


def test_tiles_of_a_merging_method_are_read_in_order_with_what_was_merged() -> None:
    layout = layout_of(next_config(side=6), 480, 640)
    (image,) = encoded([layout], seed=5)
    generator = torch.Generator().manual_seed(6)
    attention = torch.rand(layout.num_tiles, 36, generator=generator)
    keys = torch.randn(layout.num_tiles, 36, 4, generator=generator)
    features = torch.randn(layout.num_tiles, 36, 16, generator=generator)
    image = replace(
        image,
        signals=Signals(features=features, class_attention={2: attention}, keys={2: keys}),
        project=lambda rows: 2 * rows,
    )
    spec = PruningSpec(budget=40, num_tokens=0, method="visionzip")
    (selection,) = select_tokens([image], [spec], [None])
    expected: dict[int, torch.Tensor] = {}
    for tile, (share, is_real) in enumerate(zip(layout.shares(40), layout.valid(), strict=True)):
        real = is_real.nonzero().flatten()
        tokens = Image(
            Signals(
                features=features[tile, real],
                class_attention={2: attention[tile, real]},
                keys={2: keys[tile, real]},
            ),
            image.visual[tile, real],
            ENCODER,
            project=image.project,
        )
        kept = method_named("visionzip").select(tokens, share)
        assert kept.embeddings is not None
        places = (36 * tile + real[kept.indices]).tolist()
        expected.update(zip(places, kept.embeddings, strict=True))
    in_order = [position for position in layout.order.tolist() if position in expected]
    assert selection.indices.tolist() == in_order
    rows = image.rows_of(selection)
    assert torch.equal(rows, torch.stack([expected[position] for position in in_order]))


@pytest.mark.parametrize("scope", ["tile", "image"])
def test_kept_rows_and_explanations_tell_of_the_same_tokens(scope: str) -> None:
    layout = layout_of(next_config(side=6), 480, 640)
    images = encoded([layout], seed=4)
    tokens = images[0].visual.flatten(0, 1)
    model = object.__new__(PruningModel)
    model.encoder = ENCODER
    model.explanations = ExplanationStore()
    model.pixel_statistics = None, None
    model.statistics = PruningStatistics()
    model.store, model.selections = ImageStore(0), SelectionMemory()
    spec = PruningSpec(budget=40, num_tokens=0, scope=scope, explanation=7)
    (rows,) = model.select_rows(images, [[spec]], [torch.randn(3, 16)], encoded=True)
    explained = model.explanations.get(7)
    assert explained is not None
    assert [tile["tile"] for tile in explained] == [0, 1, 2, 3, 4]
    kept = {36 * tile["tile"] + token for tile in explained for token in tile["kept"]}
    in_order = [position for position in layout.order.tolist() if position in kept]
    assert len(in_order) == len(kept) == 40
    assert torch.equal(rows, tokens[in_order])
    for tile in explained:
        assert -1 not in tile["groups"] or tile["sinks"]

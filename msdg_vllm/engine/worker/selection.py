"""From encoded images to the rows that are kept of them: analyse, then select.

An image is one tile or several. Each tile is selected from by itself, all tiles of a call in one
batch; scope `image` is one run over the tokens of all tiles together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from msdg_vllm.engine.layout import TileLayout
from msdg_vllm.engine.spec import PruningSpec
from msdg_vllm.methods import (
    PADDING,
    Encoder,
    Image,
    Mappable,
    Question,
    Selection,
    Signals,
    method_named,
)

Findings = Mapping[tuple[str, str], Sequence[Mappable | None]]
"""What was found out about the tiles of an image, by method and scope; None for one without real
tokens."""

# Between the seeds of an image's tiles.
_SEED_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """One image, or one video, as the encoder gave it.

    Attributes:
        signals: What the encoder gave, `(tiles, N * patches_per_token, ..)`.
        visual: Projected tokens, `(tiles, N, D)`.
        layout: What its tiles are.
        pixels: What the encoder saw, `(tiles, 3, H, W)`, for explanations; or an object that
            makes a tile's `(3, H, W)` when it is indexed.
        project: The projector, for methods that merge in front of it; None when it cannot take
            single patches.
        finish: Makes the kept rows of kept tokens `(B, D)` and their positions among the tokens
            of all tiles, `(B,)`; None for tokens that are finished.
        rows: What the model can make it of again without the encoder, `(tiles, N, ..)`; None when
            there is no such thing.
        findings: What is known of it by method and scope, tile by tile; then no signals are needed.
    """

    signals: Signals
    visual: torch.Tensor
    layout: TileLayout
    pixels: Any = None
    project: Callable[[torch.Tensor], torch.Tensor] | None = None
    finish: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    rows: torch.Tensor | None = None
    findings: Findings = field(default_factory=dict)

    def rows_of(self, selection: Selection) -> torch.Tensor:
        """The kept rows, in reading order."""
        tokens = selection.embeddings
        if tokens is None:
            tokens = self.visual.flatten(0, 1)[selection.indices]
        return tokens if self.finish is None else self.finish(tokens, selection.indices)


def encoded_images(
    signals: Signals,
    visual: torch.Tensor,
    layouts: Sequence[TileLayout],
    pixels: torch.Tensor,
    project: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> list[EncodedImage]:
    """Part what was encoded together, image after image and tile after tile, into its images."""
    ends = list(accumulate(layout.num_tiles for layout in layouts))
    tiles = [slice(end - layout.num_tiles, end) for end, layout in zip(ends, layouts, strict=True)]
    return [
        EncodedImage(
            signals.map(itemgetter(own)),
            visual[own],
            layout,
            pixels[own],
            project,
            rows=visual[own],
        )
        for own, layout in zip(tiles, layouts, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class AnalyzedImage:
    """What no question and no budget changes about an image; the encoder's states are gone.

    Attributes:
        method: Whose analyses these are.
        scope: Whether they are of tiles or of the whole image.
        layout: What its tiles are.
        analyses: One for each tile, None for a tile without real tokens; or a single one, for
            the real tokens of all tiles in reading order.
    """

    method: str
    scope: str
    layout: TileLayout
    analyses: Sequence[Any]

    def shares(self, budget: int) -> list[int]:
        """Part a budget into those of the analyses."""
        return [budget] if len(self.analyses) == 1 else self.layout.shares(budget)


def analyze_images(
    images: Sequence[EncodedImage], specs: Sequence[PruningSpec], encoder: Encoder
) -> list[AnalyzedImage]:
    """Do for all images what no question changes: one call for each method and size of tile.

    What several ask of one image is done once, and what was found out before is not done again.
    """
    ways = [
        (id(image), spec.method, spec.scope, spec.seed)
        for image, spec in zip(images, specs, strict=True)
    ]
    distinct = dict(zip(ways, zip(images, specs, strict=True), strict=True))
    rows = {way: _rows(image, spec, encoder) for way, (image, spec) in distinct.items()}
    found = {way: image.findings.get(way[1:3]) for way, (image, _) in distinct.items()}
    keyed = [
        ((spec.method, row.num_tokens) if row and found[way] is None else None, row)
        for way, (_, spec) in distinct.items()
        for row in rows[way]
    ]
    analyses = iter(_batched(keyed, lambda key, batch: method_named(key[0]).analyze(batch)))
    by_way: dict[Any, AnalyzedImage] = {}
    for way, (image, spec) in distinct.items():
        own = [next(analyses) for _ in rows[way]]
        if (findings := found[way]) is not None:
            resume = method_named(spec.method).resume
            own = [
                None if row is None else resume(row, tile)
                for row, tile in zip(rows[way], findings, strict=True)
            ]
        by_way[way] = AnalyzedImage(spec.method, spec.scope, image.layout, own)
    return [by_way[way] for way in ways]


def select_analyzed(
    images: Sequence[AnalyzedImage],
    specs: Sequence[PruningSpec],
    queries: Sequence[torch.Tensor | None],
) -> list[Selection]:
    """Select exactly `spec.budget` tokens of each analysed image: one call for each method.

    Indices are positions among the tokens of all tiles, in reading order; scores, groups and
    sinks are those of all tiles, padding included.
    """
    keyed = [
        (image.method if share else None, (analysis, Question(share, query)))
        for image, spec, query in zip(images, specs, queries, strict=True)
        for analysis, share in zip(image.analyses, image.shares(spec.budget), strict=True)
    ]
    selections = iter(
        _batched(
            keyed,
            lambda method, batch: method_named(method).select_all(*zip(*batch, strict=True)),
        )
    )
    return [
        _of_image(
            [next(selections) for _ in image.analyses],
            image.layout,
            with_details=bool(spec.explanation),
        )
        for image, spec in zip(images, specs, strict=True)
    ]


def _batched(
    keyed: Sequence[tuple[Any, Any]], call: Callable[[Any, list[Any]], Sequence[Any]]
) -> list[Any]:
    """Call once for each key with all its values, and give each value's result in its place.

    A value whose key is None results in None.
    """
    places: defaultdict[Any, list[int]] = defaultdict(list)
    for place, (key, _) in enumerate(keyed):
        if key is not None:
            places[key].append(place)
    results: list[Any] = [None] * len(keyed)
    for key, own in places.items():
        for place, result in zip(own, call(key, [keyed[i][1] for i in own]), strict=True):
            results[place] = result
    return results


def _rows(image: EncodedImage, spec: PruningSpec, encoder: Encoder) -> list[Image | None]:
    """What methods are asked about: each tile, or all tiles as one."""
    layout = image.layout
    if spec.scope == "image" and layout.num_tiles > 1:
        order = _to_device(layout.order, image.visual)
        whole = Image(
            signals=image.signals.map(lambda tensor: tensor.flatten(0, 1)),
            visual=image.visual.flatten(0, 1),
            encoder=encoder,
            grids=layout.grids,
            seed=spec.seed,
            project=image.project,
            places=order,
        )
        return [whole.without_padding()]
    places = _real_tokens(layout, image.visual)
    return [
        Image(
            signals=image.signals.map(itemgetter(tile)),
            visual=image.visual[tile],
            encoder=encoder,
            grids=grids,
            seed=(spec.seed + tile * _SEED_STEP) % 2**63,
            project=image.project,
            places=places[tile],
        )
        if layout.tile_sizes[tile]
        else None
        for tile, grids in enumerate(layout.tile_grids())
    ]


def _real_tokens(layout: TileLayout, like: torch.Tensor) -> list[torch.Tensor | None]:
    """Which tokens of each tile are real; None for all."""
    if layout.num_tokens == layout.num_places:
        return [None] * layout.num_tiles
    places = [tile.nonzero().flatten() for tile in layout.valid()]
    on_device = _to_device(torch.cat(places), like).split(list(layout.tile_sizes))
    return [
        None if size == layout.tokens_per_tile else tile
        for size, tile in zip(layout.tile_sizes, on_device, strict=True)
    ]


def _of_image(
    rows: Sequence[Selection | None], layout: TileLayout, *, with_details: bool
) -> Selection:
    """Join the selections from the rows of an image; a row that kept nothing is None."""
    if layout.is_one_tile:
        (selection,) = rows
        assert selection is not None
        return selection
    tiles = [(tile, row) for tile, row in enumerate(rows) if row is not None]
    order = _to_device(layout.order, tiles[0][1].indices)
    if len(rows) < layout.num_tiles:
        return tiles[0][1].spread(order, layout.num_places)
    positions = torch.cat([row.indices + tile * layout.tokens_per_tile for tile, row in tiles])
    # Where each position stands in the order of reading.
    place = torch.empty(layout.num_places, dtype=torch.int64)
    place[layout.order] = torch.arange(layout.num_tokens)
    by_reading = _to_device(place, positions)[positions].argsort()

    merged = [row.embeddings for _, row in tiles if row.embeddings is not None]
    return Selection(
        positions[by_reading],
        embeddings=torch.cat(merged)[by_reading] if merged else None,
        **(_details(rows, layout.tokens_per_tile) if with_details else {}),
    )


def _details(
    tiles: Sequence[Selection | None], tokens_per_tile: int
) -> dict[str, torch.Tensor | None]:
    """Scores, groups and sinks of all tiles, one after the other."""
    joined: dict[str, torch.Tensor | None] = {}
    for name, padding in PADDING.items():
        known = [getattr(tile, name, None) for tile in tiles]
        like = next((values for values in known if values is not None), None)
        if like is not None:
            joined[name] = torch.cat(
                [
                    like.new_full((tokens_per_tile,), padding) if values is None else values
                    for values in known
                ]
            )
    return joined


def _to_device(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return async_tensor_h2d(tensor, device=like.device)

"""The worker's path of every family, from pixels to kept rows, waits for no device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from msdg_vllm.core import kernels
from msdg_vllm.engine.spec import PruningSpec
from msdg_vllm.engine.worker.image_store import ImageStore
from msdg_vllm.methods import METHODS, method_named, unmet_need
from msdg_vllm.models.mini_gemini.prepare import prepare
from tests.checkpoints import make_llava
from tests.glm_checkpoint import make_glm4v
from tests.internvl_checkpoint import TOKENS_PER_TILE, make_internvl
from tests.llava_next_checkpoint import make_llava_next
from tests.mini_gemini_checkpoint import add_profile, make_mini_gemini
from tests.qwen_checkpoint import make_qwen2_5_vl, make_qwen2_vl, make_qwen3_5, make_qwen3_vl
from tests.unit.methods.test_contract import WAITING
from tests.without_data import DEVICE, build, embed

QWENS: dict[str, Callable[..., Path]] = {
    "qwen2_vl": make_qwen2_vl,
    "qwen2_5_vl": make_qwen2_5_vl,
    "qwen3_vl": make_qwen3_vl,
    "qwen3_5": make_qwen3_5,
    "glm4v": make_glm4v,
}


@dataclass
class Family:
    """A model, and two images for it."""

    model: Any
    kwargs: dict[str, Any]
    num_tokens: tuple[int, int]
    width: int
    num_columns: int = 0


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=DEVICE)


def make_family(name: str, folder: Path) -> Family:
    if name in QWENS:
        model = build(QWENS[name](folder))
        grids = torch.tensor([[1, 8, 12], [1, 4, 6]])
        side = model.config.vision_config.patch_size
        is_raw = name in ("qwen2_vl", "qwen2_5_vl")
        dtype = torch.uint8 if is_raw else torch.bfloat16
        pixels = empty(int(grids.prod(-1).sum()), 3 * 2 * side * side, dtype=dtype)
        kwargs = {"pixel_values": pixels, "image_grid_thw": grids}
        return Family(model, kwargs, (24, 6), model.row_width, num_columns=9)
    if name == "internvl":
        model = build(make_internvl(folder))
        side = model.config.vision_config.image_size[0]
        kwargs = {
            "pixel_values": empty(5, 3, side, side),
            "image_num_patches": torch.tensor([4, 1]),
            "image_token_id": torch.tensor(3),
        }
        counts = (4 * TOKENS_PER_TILE, TOKENS_PER_TILE)
        return Family(model, kwargs, counts, model.config.text_config.hidden_size)
    if name == "llava":
        model = build(make_llava(folder))
        size = model.config.vision_config.image_size
        kwargs = {"pixel_values": empty(2, 3, size, size)}
        return Family(model, kwargs, (576, 576), model.config.text_config.hidden_size)
    if name == "llava_next":
        model = build(make_llava_next(folder))
        size = model.config.vision_config.image_size
        sizes = torch.tensor([[480, 640], [30, 1000]])
        tiles = [model.tile_layout({"image_sizes": sizes}, i) for i in range(2)]
        tiled: dict[str, Any] = {
            "pixel_values": [empty(layout.num_tiles, 3, size, size) for layout in tiles],
            "image_sizes": sizes,
        }
        counts = (tiles[0].num_tokens, tiles[1].num_tokens)
        return Family(model, tiled, counts, model.config.text_config.hidden_size)
    target = folder / "prepared"
    prepare(make_mini_gemini(folder / "published", hd=True), target)
    add_profile(target)
    model = build(target)
    config = model.config
    size = config.vision_config.image_size
    kwargs = {
        "pixel_values": empty(2, 5, 3, size, size),
        "pixel_values_aux": empty(2, 3, config.image_size_aux, config.image_size_aux),
    }
    return Family(model, kwargs, (320, 320), config.hidden_size)


@pytest.fixture(scope="module", params=["llava", "llava_next", "mini_gemini", "internvl", *QWENS])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(request.param, tmp_path_factory.mktemp(request.param))


def test_no_method_waits_and_each_keeps_its_budget(family: Family) -> None:
    encoder = family.model.encoder
    for name in METHODS:
        if name in WAITING or unmet_need(method_named(name).needs(encoder), encoder):
            continue
        for scope, query_ids in (("tile", (3, 4, 5)), ("image", ())):
            specs = [
                PruningSpec(5, family.num_tokens[0], query_ids, name, scope),
                PruningSpec(3, family.num_tokens[1], (7,), name, scope),
            ]
            rows = embed(family.model, family.kwargs, specs)
            width = family.width + family.num_columns
            assert [tuple(row.shape) for row in rows] == [(5, width), (3, width)], name


@pytest.mark.parametrize("make", [make_qwen2_vl, make_qwen2_5_vl])
def test_images_of_one_size_share_their_launches_whatever_they_are_asked(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(make(tmp_path))
    monkeypatch.setattr(kernels, "DEVICES", {DEVICE.type})
    numbers = []
    for number in (1, 2, 5):
        grids = torch.tensor([[1, 8, 12]] * number)
        pixels = empty(int(grids.prod(-1).sum()), 3 * 2 * 14 * 14, dtype=torch.uint8)
        specs = [PruningSpec(3 + place, 24, tuple(range(place))) for place in range(number)]
        with kernels.recorded_launches() as launches:
            rows = embed(model, {"pixel_values": pixels, "image_grid_thw": grids}, specs)
        assert [len(row) for row in rows] == [spec.budget for spec in specs]
        numbers.append(len(launches))
    assert numbers[0] > 15
    assert len(set(numbers)) == 1


def test_an_unpruned_image_beside_a_pruned_one_waits_for_nothing(family: Family) -> None:
    specs = [
        PruningSpec(0, 0),
        PruningSpec(3, family.num_tokens[1], (7,)),
    ]
    unpruned, pruned = embed(family.model, family.kwargs, specs)
    assert unpruned.shape[-1] == family.width
    assert tuple(pruned.shape) == (3, family.width + family.num_columns)


def test_an_image_that_is_known_is_copied_and_selected_from_without_waiting(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family.model
    monkeypatch.setattr(model, "store", ImageStore(2**26, model.encoder))
    for store in (model.store._images, model.selections._kept):
        monkeypatch.setattr(store, "_memory", empty(2**26, dtype=torch.uint8))
        store.clear()
    for name, scope in (("msdg", "tile"), ("msdg", "image"), ("cdpruner", "tile")):
        specs = [
            PruningSpec(5, family.num_tokens[0], (3, 4), name, scope, content=1),
            PruningSpec(3, family.num_tokens[1], (7,), name, scope, content=2),
        ]
        first = embed(model, family.kwargs, specs)
        num_encoded = model.statistics.encoder_images
        others = [replace(spec, query_ids=(9,)) for spec in reversed(specs)]
        backwards = {
            key: torch.stack([*reversed(value)]) if isinstance(value, torch.Tensor) else value[::-1]
            for key, value in family.kwargs.items()
            if key != "image_token_id" and (key != "pixel_values" or value[0].dim() > 1)
        }
        second = embed(model, {**family.kwargs, **backwards}, others)
        assert model.statistics.encoder_images == num_encoded
        assert [row.shape for row in second] == [row.shape for row in reversed(first)]


def test_the_guard_fails_on_what_waits(family: Family) -> None:
    specs = [PruningSpec(5, count, (7,), "prunesid") for count in family.num_tokens]
    with pytest.raises((RuntimeError, NotImplementedError)):
        embed(family.model, family.kwargs, specs)

"""What pruning adds to the memory of an encoder in its real size, on tensors without data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.selection.peak_memory import PeakMemory
from msdg_vllm.core import kernels
from msdg_vllm.engine.spec import PruningSpec
from tests.qwen_checkpoint import make_qwen2_5_vl
from tests.without_data import DEVICE, build, embed

# Qwen2.5-VL-7B.
WIDTH = 1280
SIDE = 64  # patches of an image
TOWER = {
    "depth": 32,
    "hidden_size": WIDTH,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
LANGUAGE_MODEL = {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_qwen2_5_vl(tmp_path_factory.mktemp("qwen2_5_vl"))
    (folder / "msdg_profile.json").unlink()  # the built-in one is for this size
    path: Path = folder / "config.json"
    config = json.loads(path.read_text())
    config["vision_config"] |= TOWER
    text = config["text_config"]
    text |= LANGUAGE_MODEL
    text["rope_parameters"]["mrope_section"] = [16, 24, 24]
    path.write_text(json.dumps(config))
    return build(folder)


@pytest.mark.parametrize("devices", [{DEVICE.type}, set()], ids=["kernels", "torch"])
def test_msdg_adds_at_most_four_states_and_evocut_shows_that_more_would_be_seen(
    model: Any, devices: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "DEVICES", devices)
    # What a GPU's attention keeps to itself would be a matrix of patches by patches here.
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda query, *_, **__: torch.empty_like(query)
    )
    num_patches = SIDE * SIDE
    kwargs = {
        "pixel_values": torch.empty(num_patches, 6 * 14 * 14, dtype=torch.uint8, device=DEVICE),
        "image_grid_thw": torch.tensor([[1, SIDE, SIDE]]),
    }

    def peak(method: str) -> int:
        spec = PruningSpec(num_patches // 36, num_patches // 4, (3, 4, 5), method)
        with PeakMemory(kwargs) as memory:
            embed(model, kwargs, [spec])
        return memory.peak

    # DivPrune reads no state: the encoder alone.
    state, alone = num_patches * WIDTH * 2, peak("divprune")
    added = {method: (peak(method) - alone) / state for method in ("msdg", "evocut")}
    print(f"the encoder alone {alone / state:.1f} states, added {added}")
    assert 1 < added["msdg"] <= 4 < added["evocut"]

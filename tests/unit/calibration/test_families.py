"""Towers of every family that is served: the states that the whole model has in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from msdg_vllm.calibration.loading import load_tower
from msdg_vllm.core.errors import CalibrationError
from tests.engine.internvl_oracle import InternVLOracle, by_token
from tests.engine.qwen_oracle import QwenOracle
from tests.glm_checkpoint import make_glm4v
from tests.internvl_checkpoint import make_internvl, make_internvl_chat
from tests.pictures import make_picture
from tests.qwen_checkpoint import make_qwen2_5_vl, make_qwen2_vl, make_qwen3_5, make_qwen3_vl


@pytest.mark.parametrize(
    "make", [make_qwen2_vl, make_qwen2_5_vl, make_qwen3_vl, make_qwen3_5, make_glm4v]
)
def test_states_of_merged_patches(make: Callable[[Path], Path], tmp_path: Path) -> None:
    make(tmp_path)
    picture = make_picture(300, 160, 3)
    tower = load_tower(str(tmp_path))
    encoded = tower.encode(picture)
    oracle = QwenOracle(tmp_path)
    inputs = oracle.processor.image_processor(images=[picture], return_tensors="pt")
    grid = inputs["image_grid_thw"][0]
    with torch.no_grad():
        states, _ = oracle.encode(inputs["pixel_values"], grid)
    assert encoded.grid == (int(grid[1]) // 2, int(grid[2]) // 2)
    assert len(encoded.states) == len(states) == tower.info.num_layers + 1
    for layer, state in enumerate(encoded.states):
        assert (state - states[layer]).abs().max() < 1e-4


def test_states_of_internvl_are_those_of_its_whole_image_token_by_token(tmp_path: Path) -> None:
    make_internvl(tmp_path)
    picture = make_picture(330, 165, 3)
    tower = load_tower(str(tmp_path))
    encoded = tower.encode(picture)
    oracle = InternVLOracle(tmp_path)
    tiles = oracle.tiles(picture)
    assert len(tiles) > 2, "a picture of several tiles is needed"
    with torch.no_grad():
        found = oracle.model.model.vision_tower(tiles[-1:], output_hidden_states=True)
    assert len(found.hidden_states) >= tower.info.num_layers
    assert (encoded.grid, tower.info.patches_per_token) == ((6, 6), 4)
    for ours, theirs in zip(encoded.states[:-1], found.hidden_states, strict=False):
        assert (ours - by_token(theirs[0, 1:])).abs().max() < 1e-4
    # Masks go the same way: the right half of the picture is the right half of the tokens.
    mask = np.zeros((1, 165, 330), bool)
    mask[0, :, 165:] = True
    areas = tower.areas(mask).reshape(6, 6)
    assert areas[:, 3:].min() > 0.95
    assert areas[:, :3].max() < 0.05


def test_a_checkpoint_that_brings_its_own_code_is_refused_with_the_way_out(tmp_path: Path) -> None:
    source, chat = tmp_path / "hf", tmp_path / "chat"
    source.mkdir()
    chat.mkdir()
    make_internvl(source)
    make_internvl_chat(chat, source)
    with pytest.raises(CalibrationError, match=r"code of its own.*Hugging Face"):
        load_tower(str(chat))

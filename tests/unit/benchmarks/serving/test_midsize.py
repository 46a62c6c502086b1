"""The mid-size checkpoint has the proportions of LLaVA-1.5, and the engine can load it."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from benchmarks.serving.midsize import LLAVA_1_5_7B, MIDSIZE, Proportions, build, comparison

SMALL = Proportions(
    image_size=56, tower_layers=24, tower_width=64, llm_layers=2, llm_width=64, llm_intermediate=128
)


def test_it_has_the_tower_depth_and_the_tokens_of_the_real_one() -> None:
    assert MIDSIZE.tower_layers == LLAVA_1_5_7B.tower_layers == 24
    assert MIDSIZE.num_visual_tokens == LLAVA_1_5_7B.num_visual_tokens == 576


def test_its_prefill_dominates() -> None:
    assert MIDSIZE.prefill_flops(600) > 3 * MIDSIZE.encoder_flops


def test_the_real_ones_operations_are_those_of_its_weights() -> None:
    # CLIP-ViT-L has 303 M weights in 24 layers and the 7B Llama 6.5 G in its layers; attention
    # adds a few percent.
    assert LLAVA_1_5_7B.encoder_flops == pytest.approx(2 * 577 * 302e6 * 23 / 24, rel=0.15)
    assert LLAVA_1_5_7B.prefill_flops(600) == pytest.approx(2 * 600 * 6.48e9, rel=0.05)


def test_the_comparison_has_a_row_per_retention_that_falls() -> None:
    rows = comparison((1.0, 0.5, 0.1)).splitlines()[2:]
    shares = [[int(cell.strip(" %")) for cell in row.split("|")[4:6]] for row in rows]
    assert shares[0] == [100, 100]
    assert shares == sorted(shares, reverse=True)
    # Half of 576 tokens and 24 of text are 312 of 600.
    exact = LLAVA_1_5_7B.encoder_flops + LLAVA_1_5_7B.prefill_flops(312)
    whole = LLAVA_1_5_7B.encoder_flops + LLAVA_1_5_7B.prefill_flops(600)
    assert shares[1][1] == round(100 * exact / whole)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("midsize") / "llava", SMALL)


def test_the_checkpoint_has_the_sizes_asked_for(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    assert config.architectures == ["LlavaForConditionalGeneration"]
    vision, text = config.vision_config, config.text_config
    assert (vision.num_hidden_layers, vision.hidden_size, vision.image_size) == (24, 64, 56)
    assert (text.num_hidden_layers, text.hidden_size, text.intermediate_size) == (2, 64, 128)
    assert (folder / "msdg_profile.json").is_file()


def test_its_weights_are_in_bfloat16(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_a_finished_checkpoint_is_not_built_again(folder: Path) -> None:
    weights = folder / "model.safetensors"
    before = weights.stat().st_mtime_ns
    build(folder, SMALL)
    assert weights.stat().st_mtime_ns == before
    assert json.loads((folder / "proportions.json").read_text()) == asdict(SMALL)

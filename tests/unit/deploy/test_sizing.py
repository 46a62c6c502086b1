"""The sizing table: its sums agree with vLLM's and with the product's, and the docs show it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deploy.sizing import MODELS, RETENTIONS, kv_bytes_per_token, main, table
from tests.deployment import ROOT

LOADS = {load.name.split(",")[0]: load for load in MODELS}


def test_the_docs_show_the_table_as_it_is_computed() -> None:
    assert "\n".join(table()) in (ROOT / "docs" / "deployment.md").read_text()


@pytest.mark.parametrize("load", MODELS, ids=LOADS)
def test_a_tokens_bytes_are_what_vllm_allocates(load) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    config = load.text_config
    layer = FullAttentionSpec(
        block_size=16,
        num_kv_heads=config.get("num_key_value_heads", config["num_attention_heads"]),
        head_size=config["hidden_size"] // config["num_attention_heads"],
        dtype=torch.bfloat16,
    )
    per_block = layer.page_size_bytes * config["num_hidden_layers"]
    assert kv_bytes_per_token(config) == per_block / 16


@pytest.mark.parametrize("retention", RETENTIONS[1:])
def test_a_tiled_image_has_the_budget_that_the_model_gives_it(retention: float) -> None:
    from msdg_vllm.models.llava_next import layout_of

    config = SimpleNamespace(
        vision_config=SimpleNamespace(image_size=336, patch_size=14),
        image_grid_pinpoints=[[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    )
    budget = layout_of(config, 672, 672).budget(retention)
    assert LOADS["LLaVA-NeXT-7B (Vicuna)"].num_tokens(retention) == budget


def test_qwens_tokens_are_those_of_its_image_processor() -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    # The bound of the published checkpoints' preprocessor_config.json.
    height, width = smart_resize(1008, 1008, factor=28, max_pixels=12_845_056)
    assert LOADS["Qwen2.5-VL-7B"].num_tokens(1.0) == (height // 28) * (width // 28)


def test_any_other_model_is_computed_from_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    assert main(["--config", str(tmp_path), "--tokens", "100"]) == 0
    # 2 (keys and values) x 2 layers x 4 heads x 32 numbers x 2 bytes = 1 KiB.
    assert f"| {tmp_path.name} | 1 | 100 t, 0.0977 MiB" in capsys.readouterr().out


def test_a_config_that_cannot_be_used_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--config", str(tmp_path), "--tokens", "100"])
    assert f"{tmp_path}/config.json cannot be used" in capsys.readouterr().err

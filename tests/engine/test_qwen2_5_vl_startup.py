"""Options under which pruned answers of Qwen2.5-VL would be wrong stop the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msdg_vllm.core.errors import SettingsError
from tests.engine.generation import running_engine
from tests.qwen_checkpoint import make_qwen2_5_vl


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen2_5_vl(tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"video_pruning_rate": 0.5},
            r"--video-pruning-rate 0.5 and msdg-vllm would both prune.*drop --video-pruning-rate",
        ),
        (
            {"mm_encoder_tp_mode": "data"},
            r"--mm-encoder-tp-mode data gives .*use --mm-encoder-tp-mode weights",
        ),
        (
            {"pipeline_parallel_size": 2},
            r"--pipeline-parallel-size 2 cannot prune .*use --tensor-parallel-size",
        ),
        (
            {"compilation_config": {"compile_mm_encoder": True}},
            r"compile_mm_encoder hides .*set compile_mm_encoder to false",
        ),
        (
            {"enable_lora": True, "enable_tower_connector_lora": True},
            r"--enable-tower-connector-lora counts .*drop it",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_option_that_cannot_prune_is_refused_with_the_way_out(
    folder: Path, options: dict[str, Any], words: str
) -> None:
    with (
        pytest.raises(SettingsError, match=words + ".*VLLM_PLUGINS"),
        running_engine(folder, **options),
    ):
        pass


def test_a_default_method_that_the_encoder_cannot_feed_stops_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MSDG_DEFAULT_METHOD", "cls_attention")
    with (
        pytest.raises(
            SettingsError, match=r"MSDG_DEFAULT_METHOD.*class token.*that can are 'msdg'"
        ),
        running_engine(folder),
    ):
        pass

"""What would pass pruning by is refused or turned off in the base, so that no model forgets it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from msdg_vllm.core.errors import SettingsError
from msdg_vllm.engine.guards import check_config, turn_off_encoder_graphs
from msdg_vllm.engine.worker.model import PruningModel


def config(**options: Any) -> Any:
    mm_config = SimpleNamespace(
        video_pruning_rate=options.pop("video_pruning_rate", None),
        mm_encoder_tp_mode=options.pop("mm_encoder_tp_mode", "weights"),
        mm_encoder_only=options.pop("mm_encoder_only", False),
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            get_multimodal_config=lambda: mm_config,
            uses_mrope=options.pop("uses_mrope", False),
            hf_config=None,
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=options.pop("pipeline_parallel_size", 1)
        ),
        compilation_config=SimpleNamespace(
            compile_mm_encoder=options.pop("compile_mm_encoder", False),
            cudagraph_mm_encoder=options.pop("cudagraph_mm_encoder", False),
        ),
        lora_config=SimpleNamespace(**options) if options else None,
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"video_pruning_rate": 0.5}, "--video-pruning-rate 0.5"),
        ({"mm_encoder_tp_mode": "data"}, "--mm-encoder-tp-mode data"),
        ({"pipeline_parallel_size": 2, "uses_mrope": True}, "--pipeline-parallel-size 2"),
        ({"compile_mm_encoder": True}, "compile_mm_encoder hides"),
        ({"mm_encoder_only": True}, "--mm-encoder-only, .*ec_role ec_both"),
        ({"enable_tower_connector_lora": True}, "--enable-tower-connector-lora"),
    ],
)
def test_a_model_of_any_family_is_not_built(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=rf"{words}.*VLLM_PLUGINS"):
        PruningModel(vllm_config=config(**options))


def test_options_that_change_nothing_are_allowed() -> None:
    check_config(config())
    check_config(config(pipeline_parallel_size=2))
    check_config(config(enable_tower_connector_lora=False))


def test_encoder_graphs_are_off_before_a_model_is_built() -> None:
    asked = config(cudagraph_mm_encoder=True)
    turn_off_encoder_graphs(asked)
    assert not asked.compilation_config.cudagraph_mm_encoder

    class Stock:
        def __init__(self, *, vllm_config: Any, prefix: str) -> None:
            assert not vllm_config.compilation_config.cudagraph_mm_encoder
            raise InterruptedError

    class Family(PruningModel, Stock):
        pass

    with pytest.raises(InterruptedError):
        Family(vllm_config=config(cudagraph_mm_encoder=True))

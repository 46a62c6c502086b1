"""Options of vLLM under which pruned answers would be wrong: refused at start, for every model.

Both processes ask, the API process first: its error is the one that a user sees.
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.logger import init_logger

from msdg_vllm.core.errors import SettingsError

# Below "vllm", because vLLM configures that logger and no other.
logger = init_logger(f"vllm.{__name__}")

WITHOUT_PRUNING = "leave `msdg` out of VLLM_PLUGINS to serve without pruning"
"""The last way out of every refusal at start-up."""


def check_config(vllm_config: VllmConfig) -> None:
    """Raise `SettingsError` for options under which pruned answers would be wrong."""
    mm_config = vllm_config.model_config.get_multimodal_config()
    if mm_config.video_pruning_rate:
        raise SettingsError(
            f"--video-pruning-rate {mm_config.video_pruning_rate} and msdg-vllm would both prune "
            "videos; drop --video-pruning-rate and send `retention` with each request, or "
            f"{WITHOUT_PRUNING}"
        )
    if mm_config.mm_encoder_tp_mode == "data":
        raise SettingsError(
            "--mm-encoder-tp-mode data gives each rank a part of the images only, and the states "
            "that pruning reads are lost; use --mm-encoder-tp-mode weights, or "
            f"{WITHOUT_PRUNING}"
        )
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    if num_stages > 1 and vllm_config.model_config.uses_mrope:
        raise SettingsError(
            f"--pipeline-parallel-size {num_stages} cannot prune models with M-RoPE, such as "
            "Qwen's: positions of kept tokens are known to the first stage only; use "
            f"--tensor-parallel-size, or {WITHOUT_PRUNING}"
        )
    if vllm_config.compilation_config.compile_mm_encoder:
        raise SettingsError(
            "compile_mm_encoder hides the encoder's states, which pruning reads; set "
            f"compile_mm_encoder to false, or {WITHOUT_PRUNING}"
        )
    if mm_config.mm_encoder_only:
        raise SettingsError(
            "--mm-encoder-only, which a dedicated producer of encoder caches (ec_role ec_producer) "
            "implies, loads no language model, in whose embeddings pruning looks up the question; "
            f"use ec_role ec_both, or {WITHOUT_PRUNING}"
        )
    lora_config = vllm_config.lora_config
    if lora_config is not None and lora_config.enable_tower_connector_lora:
        raise SettingsError(
            "--enable-tower-connector-lora counts an encoder's tokens by what the prompt "
            f"holds of an image, which pruning makes less; drop it, or {WITHOUT_PRUNING}"
        )


def turn_off_encoder_graphs(vllm_config: VllmConfig) -> None:
    """Have the encoder run as code: a replayed graph would pass by capture and selection.

    Model runners ask the configuration once the model is built.
    """
    if vllm_config.compilation_config.cudagraph_mm_encoder:
        vllm_config.compilation_config.cudagraph_mm_encoder = False
        logger.warning_once(
            "cudagraph_mm_encoder is turned off: encoder CUDA graphs would hide the states that "
            "pruning reads"
        )

"""Qwen3.5: Qwen3-VL's tower without DeepStack, in front of a hybrid decoder."""

from __future__ import annotations

from vllm.model_executor.models.qwen3_5 import (
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForConditionalGeneration,
)

from msdg_vllm.engine.api.processor import with_processor
from msdg_vllm.models.qwen3_vl import PruningQwen3, PruningQwen3VLProcessor


@with_processor(PruningQwen3VLProcessor)
class PruningQwen3_5(PruningQwen3, Qwen3_5ForConditionalGeneration):
    """Qwen3.5 that keeps the visual tokens its requests pay for."""


@with_processor(PruningQwen3VLProcessor)
class PruningQwen3_5Moe(PruningQwen3, Qwen3_5MoeForConditionalGeneration):  # type: ignore[misc]
    """Qwen3.5 with experts that keeps the visual tokens its requests pay for."""

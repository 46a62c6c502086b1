"""Qwen2.5-VL: Qwen2-VL with window attention, and frames placed in time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.models.qwen2_5_vl import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLMultiModalProcessor,
)

from msdg_vllm.engine.api.processor import with_processor
from msdg_vllm.models.qwen2_vl import PruningQwenVL
from msdg_vllm.models.qwen_processor import PruningQwenVLProcessor


class PruningQwen2_5_VLProcessor(PruningQwenVLProcessor, Qwen2_5_VLMultiModalProcessor):
    """Qwen2.5-VL's processor with budgets."""

    def frame_step(self, items: Any, modality: str, index: int) -> float:
        vision_config = self.info.get_hf_config().vision_config
        content = items.get(index) if modality == "video" else None
        metadata = content[1] if isinstance(content, tuple) else None
        if not metadata or not metadata.get("fps"):
            return 1.0
        # Hugging Face counts the frames that were sampled.
        sampled = len(metadata["frames_indices"]) / metadata["total_num_frames"]
        seconds = vision_config.temporal_patch_size / (metadata["fps"] * sampled)
        return float(seconds * vision_config.tokens_per_second)


@with_processor(PruningQwen2_5_VLProcessor)
class PruningQwen2_5_VL(PruningQwenVL, Qwen2_5_VLForConditionalGeneration):
    """Qwen2.5-VL that keeps the visual tokens its requests pay for."""

    def raster_order(self, metadata: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        # Inside the tower the tokens of an item are sorted by attention window.
        return metadata["reverse_indices"]

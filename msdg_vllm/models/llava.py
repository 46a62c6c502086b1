"""LLaVA-1.5: a CLIP tower of one resolution, so all images have the same number of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PixtralVisionConfig
from vllm.model_executor.models.llava import (
    LlavaForConditionalGeneration,
    LlavaMultiModalProcessor,
    LlavaProcessingInfo,
    _build_llava_or_pixtral_hf_processor,
)

from msdg_vllm.engine.api.processor import with_processor
from msdg_vllm.engine.layout import TileLayout
from msdg_vllm.engine.worker.selection import EncodedImage, encoded_images
from msdg_vllm.methods import Needs, Signals
from msdg_vllm.models.clip import ClipModel, ClipProcessor


class PruningLlavaProcessor(ClipProcessor, LlavaMultiModalProcessor):
    """LLaVA's processor with a budget per image."""

    def num_visual_tokens(
        self, items: Any, modality: str, index: int, kwargs: Mapping[str, object]
    ) -> int:
        return int(self.info.get_max_image_tokens())


def _layout(num_patches: int) -> TileLayout:
    side = math.isqrt(num_patches)
    # A checkpoint that hands the class token on has one more than a square.
    grid = (side, side) if side * side == num_patches else (1, num_patches)
    return TileLayout.of_one_tile((grid,))


def _build_processor(info: Any, dummy_inputs: Any) -> Any:
    # Pixtral-HF checkpoints carry the same architecture name and stay with stock vLLM.
    if type(info) is LlavaProcessingInfo:
        return PruningLlavaProcessor(info, dummy_inputs)
    return _build_llava_or_pixtral_hf_processor(info, dummy_inputs)


@with_processor(_build_processor)
class PruningLlava(ClipModel, LlavaForConditionalGeneration):
    """LLaVA-1.5 that keeps the visual tokens its requests pay for."""

    @classmethod
    def can_prune(cls, hf_config: Any) -> bool:
        return not isinstance(hf_config.vision_config, PixtralVisionConfig)

    def take_items(
        self, kwargs: Mapping[str, Any], modality: str, indices: Sequence[int]
    ) -> dict[str, Any]:
        # Stacking slices, because an index list would have to be copied to the device first.
        return {"pixel_values": torch.stack([kwargs["pixel_values"][i] for i in indices])}

    def encode_items(
        self, kwargs: Mapping[str, Any], modality: str, needs: Needs
    ) -> list[list[EncodedImage]]:
        pixels = kwargs["pixel_values"]
        signals, visual = self.encode_tiles(pixels, needs)
        layouts = [_layout(visual.shape[1])] * len(pixels)
        return [encoded_images(signals, visual, layouts, pixels, self.multi_modal_projector)]

    def kept_item(
        self, kwargs: Mapping[str, Any], modality: str, index: int, rows: torch.Tensor
    ) -> EncodedImage:
        pixels = kwargs["pixel_values"][index].unsqueeze(0)
        return EncodedImage(Signals(), rows, _layout(rows.shape[1]), pixels)

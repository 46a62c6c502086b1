"""LLaVA-1.5: a CLIP tower of one resolution, so all images have the same number of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PixtralVisionConfig
from vllm.model_executor.models.llava import (
    LlavaDummyInputsBuilder,
    LlavaForConditionalGeneration,
    LlavaMultiModalProcessor,
    LlavaProcessingInfo,
    _build_llava_or_pixtral_hf_info,
    _build_llava_or_pixtral_hf_processor,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from msdg_vllm.engine.api.processor import PruningProcessor
from msdg_vllm.engine.layout import TileLayout
from msdg_vllm.engine.worker.model import PruningModel
from msdg_vllm.engine.worker.selection import EncodedImage, encoded_images
from msdg_vllm.methods import Needs, Signals
from msdg_vllm.models import clip


class PruningLlavaProcessor(PruningProcessor, LlavaMultiModalProcessor):
    """LLaVA's processor with a budget per image."""

    encoder_of = staticmethod(clip.encoder_of)

    def num_visual_tokens(
        self, items: Any, modality: str, index: int, kwargs: Mapping[str, object]
    ) -> int:
        return int(self.info.get_max_image_tokens())

    def placeholder_ids(self) -> Mapping[int, str]:
        return {self.info.get_hf_config().image_token_index: "image"}


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


@MULTIMODAL_REGISTRY.register_processor(
    _build_processor,
    info=_build_llava_or_pixtral_hf_info,
    dummy_inputs=LlavaDummyInputsBuilder,
)
class PruningLlava(PruningModel, LlavaForConditionalGeneration):
    """LLaVA-1.5 that keeps the visual tokens its requests pay for."""

    encoder_of = staticmethod(clip.encoder_of)

    @classmethod
    def can_prune(cls, hf_config: Any) -> bool:
        return not isinstance(hf_config.vision_config, PixtralVisionConfig)

    def encoder_blocks(self) -> Sequence[nn.Module]:
        return clip.blocks_of(self.vision_tower)

    def take_items(
        self, kwargs: Mapping[str, Any], modality: str, indices: Sequence[int]
    ) -> dict[str, Any]:
        # Stacking slices, because an index list would have to be copied to the device first.
        return {"pixel_values": torch.stack([kwargs["pixel_values"][i] for i in indices])}

    def encode_items(
        self, kwargs: Mapping[str, Any], modality: str, needs: Needs
    ) -> list[list[EncodedImage]]:
        pixels = kwargs["pixel_values"]
        stream, num_leading = self.token_stream(needs), clip.num_leading_tokens(self.config)
        with clip.capture(self.vision_tower, needs, stream, num_leading) as captured:
            features: Any = self._image_pixels_to_features(self.vision_tower, pixels)
        layouts = [_layout(features.shape[1])] * len(pixels)
        signals = clip.patch_signals(captured, features, needs, stream)
        projector: Any = self.multi_modal_projector
        return [encoded_images(signals, projector(features), layouts, pixels, projector)]

    def kept_item(
        self, kwargs: Mapping[str, Any], modality: str, index: int, rows: torch.Tensor
    ) -> EncodedImage:
        pixels = kwargs["pixel_values"][index].unsqueeze(0)
        return EncodedImage(Signals(), rows, _layout(rows.shape[1]), pixels)

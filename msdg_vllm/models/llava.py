"""LLaVA-1.5: a CLIP tower of one resolution, so all images have the same number of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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

from msdg_vllm.engine.embedding import EncodedImages, PruningModel
from msdg_vllm.engine.processor import PruningProcessor
from msdg_vllm.engine.states import capture_states


class PruningLlavaProcessor(PruningProcessor, LlavaMultiModalProcessor):
    """LLaVA's processor with a budget per image."""

    def num_visual_tokens(
        self, items: Any, modality: str, index: int, kwargs: Mapping[str, object]
    ) -> int:
        return int(self.info.get_max_image_tokens())

    def placeholder_ids(self) -> Mapping[int, str]:
        return {self.info.get_hf_config().image_token_index: "image"}


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

    @classmethod
    def can_prune(cls, hf_config: Any) -> bool:
        return not isinstance(hf_config.vision_config, PixtralVisionConfig)

    def encoder_blocks(self) -> Sequence[nn.Module]:
        tower: Any = self.vision_tower
        blocks: Sequence[nn.Module] = tower.vision_model.encoder.layers
        return blocks

    def take_items(
        self, kwargs: Mapping[str, Any], modality: str, indices: Sequence[int]
    ) -> dict[str, Any]:
        # Stacking slices, because an index list would have to be copied to the device first.
        return {"pixel_values": torch.stack([kwargs["pixel_values"][i] for i in indices])}

    def encode_items(self, kwargs: Mapping[str, Any], modality: str) -> Iterator[EncodedImages]:
        with capture_states(self.encoder_blocks(), self.profile.layers) as states:
            features: Any = self._image_pixels_to_features(
                self.vision_tower, kwargs["pixel_values"]
            )
        patches = features.shape[1]
        yield EncodedImages(
            # The class token comes first and is no candidate.
            states={layer: states.pop(layer)[:, -patches:] for layer in tuple(states)},
            visual=self.multi_modal_projector(features),
            grid=(math.isqrt(patches), math.isqrt(patches)),
            pixels=kwargs["pixel_values"],
        )

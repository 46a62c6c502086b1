"""Gemma 3: 256 tokens of an average over patches, pruned by what they are when projected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.models.gemma3_mm import (
    Gemma3DummyInputsBuilder,
    Gemma3ForConditionalGeneration,
    Gemma3MultiModalProcessor,
    Gemma3ProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from msdg_vllm.models.projected import ProjectedModel, ProjectedProcessor


class PruningGemma3Processor(ProjectedProcessor, Gemma3MultiModalProcessor):
    """Gemma 3's processor with a budget per image."""


@MULTIMODAL_REGISTRY.register_processor(
    PruningGemma3Processor,
    info=Gemma3ProcessingInfo,
    dummy_inputs=Gemma3DummyInputsBuilder,
)
class PruningGemma3(ProjectedModel, Gemma3ForConditionalGeneration):
    """Gemma 3 that keeps the visual tokens its requests pay for."""

    def pixels_of(self, kwargs: Mapping[str, Any], index: int) -> Any:
        crop = sum(map(int, kwargs["num_patches"][:index]))  # other images may be cut up
        return kwargs["pixel_values"][crop : crop + 1]

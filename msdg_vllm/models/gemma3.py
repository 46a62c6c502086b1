"""Gemma 3: 256 tokens of an average over patches, pruned by what they are when projected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.models.gemma3_mm import (
    Gemma3ForConditionalGeneration,
    Gemma3MultiModalProcessor,
)

from msdg_vllm.engine.api.processor import with_processor
from msdg_vllm.models.projected import ProjectedModel, ProjectedProcessor


class PruningGemma3Processor(ProjectedProcessor, Gemma3MultiModalProcessor):
    """Gemma 3's processor with a budget per image."""


@with_processor(PruningGemma3Processor)
class PruningGemma3(ProjectedModel, Gemma3ForConditionalGeneration):
    """Gemma 3 that keeps the visual tokens its requests pay for."""

    def pixels_of(self, kwargs: Mapping[str, Any], index: int) -> Any:
        crop = sum(map(int, kwargs["num_patches"][:index]))  # other images may be cut up
        return kwargs["pixel_values"][crop : crop + 1]

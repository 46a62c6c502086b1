"""Kimi-VL: any resolution, four patches to a token, pruned by what tokens are when projected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.model_executor.models.kimi_vl import (
    KimiVLDummyInputsBuilder,
    KimiVLForConditionalGeneration,
    KimiVLMultiModalProcessor,
    KimiVLProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from msdg_vllm.models.projected import ProjectedModel, ProjectedProcessor


class PruningKimiVLProcessor(ProjectedProcessor, KimiVLMultiModalProcessor):
    """Kimi-VL's processor with a budget per image."""


@MULTIMODAL_REGISTRY.register_processor(
    PruningKimiVLProcessor,
    info=KimiVLProcessingInfo,
    dummy_inputs=KimiVLDummyInputsBuilder,
)
class PruningKimiVL(ProjectedModel, KimiVLForConditionalGeneration):
    """Kimi-VL that keeps the visual tokens its requests pay for."""

    def take_items(
        self, kwargs: Mapping[str, Any], modality: str, indices: Sequence[int]
    ) -> dict[str, Any]:
        grids = kwargs["image_grid_hws"][list(indices)]
        # vLLM puts those of a graph on the device; on the host nobody waits for them.
        return {**super().take_items(kwargs, modality, indices), "image_grid_hws": grids}

    def grid_of(self, kwargs: Mapping[str, Any], index: int, num_tokens: int) -> tuple[int, int]:
        _, patches = kwargs["image_grid_hws"][index].tolist()
        columns = patches // self.config.vision_config.merge_kernel_size[1]
        return num_tokens // columns, columns

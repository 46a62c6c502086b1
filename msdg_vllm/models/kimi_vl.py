"""Kimi-VL: any resolution, four patches to a token, pruned by what tokens are when projected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.models.kimi_vl import (
    KimiVLForConditionalGeneration,
    KimiVLMultiModalProcessor,
)

from msdg_vllm.engine.api.processor import with_processor
from msdg_vllm.models.projected import ProjectedModel, ProjectedProcessor


@dataclass(frozen=True, slots=True)
class _Patches:
    """What the encoder saw of one image, put together only when someone wants to see it."""

    patches: torch.Tensor
    shape: tuple[int, int]

    def __getitem__(self, _: int) -> torch.Tensor:
        """`(3, H, W)`."""
        cells = self.patches.unflatten(0, self.shape)  # (rows, columns, 3, side, side)
        return cells.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)


class PruningKimiVLProcessor(ProjectedProcessor, KimiVLMultiModalProcessor):
    """Kimi-VL's processor with a budget per image."""


@with_processor(PruningKimiVLProcessor)
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

    def pixels_of(self, kwargs: Mapping[str, Any], index: int) -> _Patches:
        shapes = kwargs["image_grid_hws"][: index + 1].tolist()
        *before, count = (rows * columns for rows, columns in shapes)
        start = sum(before)
        rows, columns = shapes[-1]
        return _Patches(kwargs["pixel_values"][start : start + count], (rows, columns))

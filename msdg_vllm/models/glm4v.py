"""GLM-4.1V, 4.5V and 4.6V: a tower with Qwen's interface; images are pruned, videos stay whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.model_executor.models.glm4_1v import (
    Glm4vForConditionalGeneration,
    Glm4vMoeForConditionalGeneration,
    Glm4vMultiModalProcessor,
)
from vllm.multimodal.inputs import MultiModalFeatureSpec

from msdg_vllm.engine.api.processor import with_processor
from msdg_vllm.engine.worker.positions import MediaGrid, Medium
from msdg_vllm.models.qwen2_vl import PruningQwenVL
from msdg_vllm.models.qwen_processor import GRID, PruningQwenVLProcessor


class PruningGlm4vProcessor(PruningQwenVLProcessor, Glm4vMultiModalProcessor):
    """GLM-4V's processor with a budget per image."""

    # The worker does not know the timestamps between frames.
    modalities = ("image",)

    def grid(
        self, items: Any, modality: str, index: int, kwargs: Mapping[str, object]
    ) -> tuple[int, int, int]:
        size = items.get_image_size(index)
        resized, _ = self.info._get_vision_info(
            image_width=size.width,
            image_height=size.height,
            num_frames=1,
            max_image_pixels=self.info._get_image_max_pixels(),
        )
        return self.merged(1, resized)

    def placeholder_ids(self) -> Mapping[int, str]:
        return {self.info.get_hf_config().image_token_id: "image"}


class PruningGlm(PruningQwenVL):
    """Mixin for GLM's vision models: goes before the stock class in the bases."""

    modalities = ("image",)

    def media(self, mm_features: list[MultiModalFeatureSpec]) -> Sequence[Medium]:
        media = []
        for feature in mm_features:
            data: Any = feature.data
            frames, rows, columns = self.merged(data[GRID[feature.modality]].data.tolist())
            # The frames of a video stand between texts, each one grid.
            runs = feature.mm_position.extract_embeds_range()
            media += [
                MediaGrid(start, end - start + 1, (frames // len(runs), rows, columns))
                for start, end in runs
            ]
        return media


@with_processor(PruningGlm4vProcessor)
class PruningGlm4v(PruningGlm, Glm4vForConditionalGeneration):
    """GLM-4.1V that keeps the visual tokens its requests pay for."""


@with_processor(PruningGlm4vProcessor)
class PruningGlm4vMoe(PruningGlm, Glm4vMoeForConditionalGeneration):
    """GLM-4.5V and 4.6V that keep the visual tokens their requests pay for."""

"""What vLLM asks about Mini-Gemini's inputs: every image costs the same number of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    PromptReplacement,
    PromptUpdate,
)

from msdg_vllm.engine.layout import TileLayout
from msdg_vllm.models.clip import ClipProcessor
from msdg_vllm.models.mini_gemini.config import MGMConfig
from msdg_vllm.models.mini_gemini.images import MiniGeminiImages

IMAGE_TOKEN = "<image>"


def layout_of(config: MGMConfig) -> TileLayout:
    """The tiles of every image: the whole first, then the cells, one behind the other."""
    return TileLayout.of_squares(config.num_tiles, config.tokens_per_tile)


class MiniGeminiProcessingInfo(BaseProcessingInfo):
    """Configuration and sizes."""

    def get_hf_config(self) -> MGMConfig:
        return self.ctx.get_hf_config(MGMConfig)

    def get_hf_processor(self, **kwargs: object) -> Any:
        # Images alone: vLLM's renderer has tokenised the text before a processor is asked.
        return MiniGeminiImages(self.get_hf_config())

    def get_supported_mm_processor_kwargs(self) -> dict[str, set[str]]:
        return {}

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        return {"image": self.num_image_tokens()}

    def num_image_tokens(self) -> int:
        """Tokens of any image before pruning."""
        config = self.get_hf_config()
        return config.num_tiles * config.tokens_per_tile


class MiniGeminiDummyInputs(BaseDummyInputsBuilder[MiniGeminiProcessingInfo]):
    """Inputs for memory profiling."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return IMAGE_TOKEN * mm_counts.get("image", 0)

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any
    ) -> dict[str, Any]:
        side = self.info.get_hf_config().image_size_aux
        return {
            "image": self._get_dummy_images(
                width=side,
                height=side,
                num_images=mm_counts.get("image", 0),
                overrides=mm_options.get("image"),
            )
        }


class MiniGeminiProcessor(BaseMultiModalProcessor[MiniGeminiProcessingInfo]):
    """Mini-Gemini's processor without pruning."""

    def _get_mm_fields_config(
        self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {
            "pixel_values": MultiModalFieldConfig.batched("image"),
            "pixel_values_aux": MultiModalFieldConfig.batched("image"),
        }

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, object], out_mm_kwargs: Any
    ) -> Sequence[PromptUpdate]:
        image_token_id = self.info.get_hf_config().image_token_index
        return [
            PromptReplacement(
                modality="image",
                target=[image_token_id],
                replacement=[image_token_id] * self.info.num_image_tokens(),
            )
        ]


class PruningMiniGeminiProcessor(ClipProcessor, MiniGeminiProcessor):
    """Mini-Gemini's processor with a budget per tile."""

    def num_visual_tokens(
        self, items: Any, modality: str, index: int, kwargs: Mapping[str, object]
    ) -> int:
        return self.info.num_image_tokens()

    def budget(
        self, items: Any, modality: str, index: int, kwargs: Mapping[str, object], retention: float
    ) -> int:
        return layout_of(self.info.get_hf_config()).budget(retention)

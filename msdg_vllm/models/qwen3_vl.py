"""Qwen3-VL: Qwen2-VL with DeepStack levels behind each token, and timestamps between frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from vllm.model_executor.models.qwen3_vl import (
    Qwen3VLForConditionalGeneration,
    Qwen3VLMultiModalProcessor,
)
from vllm.model_executor.models.qwen3_vl_moe import (
    Qwen3VLMoeForConditionalGeneration,
)
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.utils.torch_utils import async_tensor_h2d

from msdg_vllm.engine.api.processor import with_processor
from msdg_vllm.engine.worker.lookup import embed_queries
from msdg_vllm.engine.worker.positions import FramesInText, MediaGrid, Medium, with_positions
from msdg_vllm.models.qwen2_vl import PruningQwenVL
from msdg_vllm.models.qwen_processor import GRID, PruningQwenVLProcessor


class PruningQwen3VLProcessor(PruningQwenVLProcessor, Qwen3VLMultiModalProcessor):
    """Qwen3-VL's processor with budgets; a video's budget is for all its frames together."""

    carrying_text = ("video",)

    def extent(
        self,
        items: Any,
        modality: str,
        index: int,
        kwargs: Mapping[str, object],
        num_texts: int,
    ) -> int:
        frames, rows, columns = self.grid(items, modality, index, kwargs)
        return num_texts + frames * max(rows, columns)


class PruningQwen3(PruningQwenVL):
    """Mixin for the models that look with Qwen3-VL's tower, with or without DeepStack."""

    _tokenizer: Any

    def take_items(
        self, kwargs: Mapping[str, Any], modality: str, indices: Sequence[int]
    ) -> dict[str, Any]:
        taken = super().take_items(kwargs, modality, indices)
        if modality == "video":
            taken["timestamps"] = [kwargs["timestamps"][index] for index in indices]
        return taken

    def media(self, mm_features: list[MultiModalFeatureSpec]) -> Sequence[Medium]:
        media: list[Medium] = []
        for feature in mm_features:
            data: Any = feature.data
            offset, length = feature.mm_position.offset, feature.mm_position.length
            shape = self.merged(data[GRID[feature.modality]].data.tolist())
            if feature.modality == "image":
                media.append(MediaGrid(offset, length, shape))
            else:
                media.append(self._video(shape, data["timestamps"].data, offset, length))
        return media

    def _video(
        self,
        shape: tuple[int, int, int],
        timestamps: Sequence[float] | torch.Tensor,
        offset: int = 0,
        length: int = 0,
    ) -> FramesInText:
        frames, rows, columns = shape
        content = Qwen3VLMultiModalProcessor.get_video_repl(
            tokens_per_frame=[rows * columns] * frames,
            timestamps=timestamps,
            tokenizer=self._tokenizer,
            vision_start_token_id=self.config.vision_start_token_id,
            vision_end_token_id=self.config.vision_end_token_id,
            video_token_id=self.config.video_token_id,
        )
        return FramesInText(
            offset, length, content.full, self.config.video_token_id, (rows, columns)
        )

    def finisher(
        self,
        kwargs: Mapping[str, Any],
        modality: str,
        index: int,
        shape: tuple[int, int, int],
        rows: torch.Tensor,
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        place = super().finisher(kwargs, modality, index, shape, rows)
        levels = rows[:, self.embedding_width :]
        if modality == "image":
            return lambda tokens, kept: place(torch.cat([tokens, levels[kept]], dim=-1), kept)
        video = self._video(shape, kwargs["timestamps"][index])
        is_text = video.is_text
        to_device = partial(async_tensor_h2d, device=rows.device)

        def between_texts(tokens: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
            text = self._embed_text(video.text_ids)
            whole = torch.cat([torch.cat([tokens, levels[kept]], dim=-1), text])
            pads, texts = (to_device(mask.nonzero().flatten()) for mask in (~is_text, is_text))
            places = torch.cat([pads[kept], texts])
            order = places.argsort()
            return with_positions(to_device(video.positions()), whole[order], places[order])

        return between_texts

    def _embed_text(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Rows of text, which has nothing on the levels."""
        language_model: Any = self.get_language_model()  # type: ignore[attr-defined]
        (embeddings,) = embed_queries(language_model, [tuple(token_ids)])
        assert embeddings is not None
        levels = embeddings.new_zeros(len(embeddings), self.row_width - self.embedding_width)
        return torch.cat([embeddings, levels], dim=-1)


@with_processor(PruningQwen3VLProcessor)
class PruningQwen3VL(PruningQwen3, Qwen3VLForConditionalGeneration):
    """Qwen3-VL that keeps the visual tokens its requests pay for."""


@with_processor(PruningQwen3VLProcessor)
class PruningQwen3VLMoe(PruningQwen3, Qwen3VLMoeForConditionalGeneration):  # type: ignore[misc]
    """Qwen3-VL with experts that keeps the visual tokens its requests pay for."""

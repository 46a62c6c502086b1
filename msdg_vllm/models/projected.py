"""Models that are pruned by their projected tokens alone, without a look into the encoder.

For models of the list in `msdg_vllm.ARCHITECTURES` only: an image is one run of rows, each a token
of it, with positions that count on. How many rows, and where, is what stock vLLM says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing import PromptUpdateDetails

from msdg_vllm.core.errors import ProfileError, RequestError
from msdg_vllm.core.profiles import EncoderProfile
from msdg_vllm.engine.api.processor import SPECS, PruningProcessor
from msdg_vllm.engine.layout import TileLayout
from msdg_vllm.engine.worker.model import PruningModel
from msdg_vllm.engine.worker.selection import EncodedImage
from msdg_vllm.methods import Encoder, Needs, Signals


def encoder_of(hf_config: Any, profile: EncoderProfile | None) -> Encoder:
    """An encoder of which methods know nothing but what it puts out."""
    if profile is not None:
        raise ProfileError(
            f"{type(hf_config).__name__} is pruned by its projected tokens alone, and no method "
            f"that can do so reads a profile; start without one"
        )
    return Encoder(
        num_layers=hf_config.vision_config.num_hidden_layers,
        profile=None,
        has_class_token=False,
        shows_states=False,
    )


class ProjectedProcessor(PruningProcessor):
    """Mixin for a vLLM processor whose placeholders follow from the items alone."""

    encoder_of = staticmethod(encoder_of)

    def num_visual_tokens(
        self, items: Any, modality: str, index: int, kwargs: Mapping[str, object]
    ) -> int:
        return int(self._is_embed(items, modality, index, kwargs).sum())

    def placeholder_ids(self) -> Mapping[int, str]:
        updates: Any = self._get_prompt_updates(MultiModalDataItems(), {}, {})
        return {update.target[0]: update.modality for update in updates}

    def check_prompt(self, processed: Any, items: Any, kwargs: Mapping[str, object]) -> None:
        for modality, specs in processed[SPECS].items():
            for index, spec in enumerate(specs):
                if not 0 < spec.budget < spec.num_tokens:
                    continue
                is_embed = self._is_embed(items[modality], modality, index, kwargs)
                places = is_embed.nonzero().flatten()
                if int(places[-1] - places[0]) + 1 != len(places):
                    raise RequestError(
                        f"retention cannot be applied to {modality} {index}: with these "
                        "mm_processor_kwargs it has text between its tokens; leave out the kwargs "
                        "that cut it up, or send retention 1.0",
                        parameter="retention",
                    )

    def _is_embed(
        self, items: Any, modality: str, index: int, kwargs: Mapping[str, object]
    ) -> torch.Tensor:
        """Which of the tokens that stock vLLM puts in a prompt for an item the encoder fills."""
        updates: Any = self._get_prompt_updates(MultiModalDataItems({modality: items}), kwargs, {})
        (replacement,) = [one.replacement for one in updates if one.modality == modality]
        content = replacement(index) if callable(replacement) else replacement
        if not isinstance(content, PromptUpdateDetails) or content.is_embed is None:
            full = content.full if isinstance(content, PromptUpdateDetails) else content
            return torch.ones(len(full), dtype=torch.bool)
        return content.is_embed(content.full)


class ProjectedModel(PruningModel):
    """Mixin for a vLLM model that can part its items, as encoder CUDA graphs have it."""

    encoder_of = staticmethod(encoder_of)

    vision_tower: Any

    def encoder_blocks(self) -> Sequence[nn.Module]:
        # Nobody looks inside.
        return [self.vision_tower]

    def take_items(
        self, kwargs: Mapping[str, Any], modality: str, indices: Sequence[int]
    ) -> dict[str, Any]:
        stock: Any = super()
        taken: dict[str, Any] = stock.select_encoder_cudagraph_items(kwargs, list(indices))
        return taken

    def grid_of(self, kwargs: Mapping[str, Any], index: int, num_tokens: int) -> tuple[int, int]:
        """Rows and columns of an item's tokens; a square unless a model knows better."""
        side = math.isqrt(num_tokens)
        return (side, side) if side * side == num_tokens else (1, num_tokens)

    def pixels_of(self, kwargs: Mapping[str, Any], index: int) -> Any:
        """What the encoder saw of an item, as `EncodedImage.pixels` has it; None: nobody knows."""
        return None

    def encode_items(
        self, kwargs: Mapping[str, Any], modality: str, needs: Needs
    ) -> Iterator[list[EncodedImage]]:
        for index, rows in enumerate(super().embed_multimodal(**kwargs)):
            yield [self.kept_item(kwargs, modality, index, rows[None])]

    def kept_item(
        self, kwargs: Mapping[str, Any], modality: str, index: int, rows: torch.Tensor
    ) -> EncodedImage:
        grid = self.grid_of(kwargs, index, rows.shape[1])
        layout = TileLayout.of_one_tile((grid,))
        return EncodedImage(Signals(), rows, layout, self.pixels_of(kwargs, index), rows=rows)

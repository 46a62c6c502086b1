"""InternVL: tiles and a thumbnail, a class token, four patches to a token by pixel shuffle.

vLLM has two classes for it, for the two formats of its checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.model_executor.models.interns1 import (
    InternS1ForConditionalGeneration,
    InternS1MultiModalProcessor,
)
from vllm.model_executor.models.internvl import (
    InternVLChatModel,
    InternVLMultiModalProcessor,
)
from vllm.utils.torch_utils import async_tensor_h2d

from msdg_vllm.core import num_kept_tokens
from msdg_vllm.core.profiles import EncoderProfile
from msdg_vllm.engine.api.processor import PruningProcessor, with_processor
from msdg_vllm.engine.layout import TileLayout
from msdg_vllm.engine.worker.capture import capture_signals
from msdg_vllm.engine.worker.model import PruningModel
from msdg_vllm.engine.worker.selection import EncodedImage, encoded_images
from msdg_vllm.methods import Encoder, Needs, Signals


def encoder_of(hf_config: Any, profile: EncoderProfile | None) -> Encoder:
    """The encoder of a checkpoint: vLLM builds it up to the layer whose output is projected."""
    num_layers = hf_config.vision_config.num_hidden_layers
    # Only the older format may choose another layer than the last.
    selected = getattr(hf_config, "select_layer", -1)
    return Encoder(
        num_layers=selected + 1 if selected >= 0 else num_layers + selected + 1,
        profile=profile,
        patches_per_token=int(1 / hf_config.downsample_ratio) ** 2,
    )


class PruningInternVLProcessor(PruningProcessor):
    """Mixin for InternVL's processors: a budget per tile."""

    encoder_of = staticmethod(encoder_of)

    def num_visual_tokens(
        self, items: Any, modality: str, index: int, kwargs: Mapping[str, object], **more: Any
    ) -> int:
        size = items.get_image_size(index)
        return int(
            self.info.get_num_image_tokens(
                image_width=size.width,
                image_height=size.height,
                processor=self.info.get_hf_processor(**kwargs),
                **more,
            )
        )

    def budget(
        self, items: Any, modality: str, index: int, kwargs: Mapping[str, object], retention: float
    ) -> int:
        tokens_per_tile = self.info.get_hf_processor(**kwargs).image_seq_length
        num_tiles = self.num_visual_tokens(items, modality, index, kwargs) // tokens_per_tile
        return num_tiles * num_kept_tokens(tokens_per_tile, retention)


class PruningInternVLModel(PruningModel):
    """Mixin for InternVL's models: goes before the stock class in the bases.

    Attributes:
        pixels_name: The field with the pixels of tiles, the thumbnail last.
        attention_of: The module of a block that hands queries and keys to a fused `attn`.
        scale_of: What a block multiplies the output of its MLP by.
    """

    encoder_of = staticmethod(encoder_of)
    pixels_name: str
    attention_of: Callable[[Any], Any]
    scale_of: Callable[[Any], torch.Tensor]
    num_image_token: int
    downsample_ratio: float
    extract_feature: Any
    pixel_shuffle: Any

    def take_items(
        self, kwargs: Mapping[str, Any], modality: str, indices: Sequence[int]
    ) -> dict[str, Any]:
        counts = [int(count) for count in kwargs["image_num_patches"]]
        tiles = kwargs[self.pixels_name].split(counts)
        return {
            self.pixels_name: torch.cat([tiles[index] for index in indices]),
            "image_num_patches": torch.tensor([counts[index] for index in indices]),
            "image_token_id": kwargs["image_token_id"],
        }

    def encode_items(
        self, kwargs: Mapping[str, Any], modality: str, needs: Needs
    ) -> list[list[EncodedImage]]:
        pixels = kwargs[self.pixels_name]
        if needs.features:
            # The projector takes whole tokens, and what it takes is the last state.
            needs = needs | Needs(states=(self.encoder.num_layers,))
        order = async_tensor_h2d(self._patch_order(), device=pixels.device)
        stream = self.token_stream(needs, order=order)
        with capture_signals(
            self.encoder_blocks(),
            needs,
            self.attention_of,
            stream=stream,
            rows_of=lambda state: state[:, -len(order) :],
            scale_of=self.scale_of,
        ) as captured:
            visual = self.extract_feature(pixels)
        layouts = [
            TileLayout.of_squares(count, self.num_image_token)
            for count in kwargs["image_num_patches"].tolist()
        ]
        signals = self._patch_signals(captured, needs, order)
        if stream is not None:
            signals = replace(signals, token_signals=stream.finish())
        return [encoded_images(signals, visual, layouts, pixels)]

    def kept_item(
        self, kwargs: Mapping[str, Any], modality: str, index: int, rows: torch.Tensor
    ) -> EncodedImage:
        start = sum(map(int, kwargs["image_num_patches"][:index]))
        pixels = kwargs[self.pixels_name][start : start + len(rows)]
        layout = TileLayout.of_squares(len(rows), self.num_image_token)
        return EncodedImage(Signals(), rows, layout, pixels)

    def _patch_order(self) -> torch.Tensor:
        """Where the encoder has the patches of a tile, token by token, `(P,)`."""
        num_patches = self.num_image_token * self.encoder.patches_per_token
        side = math.isqrt(num_patches)
        # Which patches make a token is what the model itself does to their numbers.
        numbers = torch.arange(num_patches, dtype=torch.float64).view(1, side, side, 1)
        order: torch.Tensor = self.pixel_shuffle(numbers, self.downsample_ratio).flatten().long()
        return order

    def _patch_signals(self, captured: Signals, needs: Needs, order: torch.Tensor) -> Signals:
        """What was captured about patches, token by token: the class token comes first."""
        signals = captured.map(lambda tensor: tensor[:, -len(order) :][:, order])
        return replace(
            signals,
            features=signals.states[self.encoder.num_layers] if needs.features else None,
            received_attention={
                layer: signals.received_attention[layer] / total.shape[1]
                for layer, total in captured.received_attention.items()
            },
        )


class PruningInternVLChatProcessor(PruningInternVLProcessor, InternVLMultiModalProcessor):
    """The processor of InternVL's own format with budgets."""

    def placeholder_ids(self) -> Mapping[int, str]:
        # Text as far as the tokenizer is concerned, unless a checkpoint made it a token.
        token_ids = self.info.get_tokenizer().encode("<image>", add_special_tokens=False)
        return {token_ids[0]: "image"} if len(token_ids) == 1 else {}


@with_processor(PruningInternVLChatProcessor)
class PruningInternVLChat(PruningInternVLModel, InternVLChatModel):
    """InternVL in its own format that keeps the visual tokens its requests pay for."""

    pixels_name = "pixel_values_flat"
    attention_of = attrgetter("attn")
    scale_of = attrgetter("ls2")

    def encoder_blocks(self) -> Sequence[nn.Module]:
        return list(self.vision_model.encoder.layers)


class PruningInternVLHfProcessor(PruningInternVLProcessor, InternS1MultiModalProcessor):
    """The processor of InternVL in Hugging Face's format with budgets."""

    def num_visual_tokens(
        self, items: Any, modality: str, index: int, kwargs: Mapping[str, object], **more: Any
    ) -> int:
        return super().num_visual_tokens(items, modality, index, kwargs, mm_kwargs=kwargs)

    def placeholder_ids(self) -> Mapping[int, str]:
        return {self.info.get_hf_processor().image_token_id: "image"}


@with_processor(PruningInternVLHfProcessor)
class PruningInternVLHf(PruningInternVLModel, InternS1ForConditionalGeneration):
    """InternVL in Hugging Face's format that keeps the visual tokens its requests pay for."""

    pixels_name = "pixel_values"
    scale_of = attrgetter("lambda_2")

    def encoder_blocks(self) -> Sequence[nn.Module]:
        return list(self.vision_tower.encoder.layer)

    @staticmethod
    def attention_of(block: Any) -> Any:
        # Not parted among ranks: each has all heads.
        return SimpleNamespace(attn=block.attention.attn, tp_size=1)

"""The CLIP tower that the models of the LLaVA family look with, and what they share for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import CLIPVisionConfig
from vllm.model_executor.models.llava import _get_num_hidden_layers

from msdg_vllm.core.profiles import EncoderProfile
from msdg_vllm.core.stream import TokenStream
from msdg_vllm.engine.api.processor import PruningProcessor
from msdg_vllm.engine.worker.capture import capture_signals
from msdg_vllm.engine.worker.model import PruningModel
from msdg_vllm.methods import Encoder, Needs, Signals


def encoder_of(hf_config: Any, profile: EncoderProfile | None) -> Encoder:
    """The encoder of a checkpoint: vLLM builds it up to the layer whose output is projected."""
    return Encoder(
        num_layers=_get_num_hidden_layers(hf_config),
        profile=profile,
        has_class_token=isinstance(hf_config.vision_config, CLIPVisionConfig),
    )


class ClipProcessor(PruningProcessor):
    """Mixin for the processors of models with a CLIP tower."""

    encoder_of = staticmethod(encoder_of)

    def placeholder_ids(self) -> Mapping[int, str]:
        return {self.info.get_hf_config().image_token_index: "image"}


class ClipModel(PruningModel):
    """Mixin for models with a CLIP tower: goes before the stock class in the bases."""

    encoder_of = staticmethod(encoder_of)
    vision_tower: Any
    multi_modal_projector: Any
    config: Any
    _image_pixels_to_features: Any

    def encoder_blocks(self) -> Sequence[nn.Module]:
        blocks: Sequence[nn.Module] = self.vision_tower.vision_model.encoder.layers
        return blocks

    def encode_tiles(self, pixels: torch.Tensor, needs: Needs) -> tuple[Signals, torch.Tensor]:
        """What the tower gives for tiles, `(T, 3, H, W)`: signals and projected tokens."""
        stream = self.token_stream(needs)
        # Before the first token that is projected stands the class token, or none.
        num_leading = int(self.config.vision_feature_select_strategy == "default")
        with capture(self.encoder_blocks(), needs, stream, num_leading) as captured:
            features = self._image_pixels_to_features(self.vision_tower, pixels)
        signals = patch_signals(captured, features, needs, stream)
        return signals, self.multi_modal_projector(features)


def capture(
    blocks: Sequence[nn.Module], needs: Needs, stream: TokenStream | None, num_leading: int
) -> AbstractContextManager[Signals]:
    """Capture what `needs` names while the tower runs inside."""
    return capture_signals(
        blocks,
        needs,
        lambda block: block.self_attn,
        stream=stream,
        rows_of=lambda state: state[:, num_leading:],
    )


def patch_signals(
    captured: Signals, features: torch.Tensor, needs: Needs, stream: TokenStream | None
) -> Signals:
    """What was captured about patches: the class token comes first and is no candidate."""
    num_patches = features.shape[1]
    signals = captured.map(lambda tensor: tensor[:, -num_patches:])
    return replace(
        signals,
        token_signals=stream.finish() if stream else None,
        features=features if needs.features else None,
        received_attention={
            layer: signals.received_attention[layer] / total.shape[1]
            for layer, total in captured.received_attention.items()
        },
    )

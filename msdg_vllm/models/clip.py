"""The CLIP tower that the models of the LLaVA family look with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import CLIPVisionConfig
from vllm.model_executor.models.llava import _get_num_hidden_layers

from msdg_vllm.core.profiles import EncoderProfile
from msdg_vllm.core.stream import TokenStream
from msdg_vllm.engine.worker.capture import capture_signals
from msdg_vllm.methods import Encoder, Needs, Signals


def encoder_of(hf_config: Any, profile: EncoderProfile | None) -> Encoder:
    """The encoder of a checkpoint: vLLM builds it up to the layer whose output is projected."""
    return Encoder(
        num_layers=_get_num_hidden_layers(hf_config),
        profile=profile,
        has_class_token=isinstance(hf_config.vision_config, CLIPVisionConfig),
    )


def blocks_of(tower: Any) -> Sequence[nn.Module]:
    """The blocks of a tower, in order."""
    blocks: Sequence[nn.Module] = tower.vision_model.encoder.layers
    return blocks


def num_leading_tokens(hf_config: Any) -> int:
    """Tokens of the tower before the first that is projected: the class token, or none."""
    return int(hf_config.vision_feature_select_strategy == "default")


def capture(
    tower: Any, needs: Needs, stream: TokenStream | None, num_leading: int
) -> AbstractContextManager[Signals]:
    """Capture what `needs` names while the tower runs inside."""
    return capture_signals(
        blocks_of(tower),
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

"""Attention sinks, for methods that would otherwise spend their budget on them."""

import torch
from torch import Tensor

from msdg_vllm.core.profiles import EncoderProfile
from msdg_vllm.core.signals import row_norms
from msdg_vllm.methods.image import Image


def sink_states(profile: EncoderProfile) -> tuple[int, ...]:
    """Return the layers whose input states `sink_tokens` reads: one, or none without sinks."""
    return () if profile.sink_state is None else (profile.sink_state,)


def sink_tokens(image: Image) -> Tensor:
    """Return `(N,)`, True for sinks and for tokens whose state is not finite.

    Needs the states of `sink_states`. One sink among the patches of a token decides. An encoder
    without sinks has none, and nothing tells whether its states are finite.
    """
    profile = image.encoder.measured
    if profile.sink_state is None:
        return torch.zeros(image.num_tokens, dtype=torch.bool, device=image.visual.device)
    state = image.signals.states[profile.sink_state].float()
    is_sink = state[:, profile.sink_coordinate].abs() > profile.sink_threshold
    is_sink = is_sink | ~row_norms(state).isfinite()
    return is_sink.view(-1, image.encoder.patches_per_token).any(dim=-1)

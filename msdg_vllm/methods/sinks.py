"""Attention sinks, for methods that would otherwise spend their budget on them."""

from torch import Tensor

from msdg_vllm.core.signals import row_norms
from msdg_vllm.methods.image import Image


def sink_tokens(image: Image) -> Tensor:
    """Return `(N,)`, True for sinks and for tokens whose state is not finite.

    Needs the state after the sink layer. One sink among the patches of a token decides.
    """
    profile = image.encoder.profile
    state = image.signals.states[profile.sink_layer + 1].float()
    is_sink = state[:, profile.sink_coordinate].abs() > profile.sink_threshold
    is_sink = is_sink | ~row_norms(state).isfinite()
    return is_sink.view(-1, image.encoder.patches_per_token).any(dim=-1)

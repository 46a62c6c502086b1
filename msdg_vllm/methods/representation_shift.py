"""Representation Shift (Choi et al., 2025): how far one MLP of the encoder moves each token."""

from msdg_vllm.core.profiles import EncoderProfile
from msdg_vllm.methods.image import Image, Selection, top_tokens
from msdg_vllm.methods.method import Method
from msdg_vllm.methods.needs import Encoder, Needs
from msdg_vllm.methods.sinks import sink_states, sink_tokens


class RepresentationShift(Method):
    """The largest L2 norm of what the MLP of a layer adds; sinks only for lack of others.

    The layer is the one in the middle of the saliency window, or of the layers between the ends
    of the direction where the profile has no window. Waits for no device.
    """

    reads_profile = True

    def needs(self, encoder: Encoder) -> Needs:
        profile = encoder.measured
        return Needs(mlp_updates=(_layer(profile),), states=sink_states(profile))

    def select(self, image: Image, budget: int) -> Selection:
        scores = image.per_token(image.signals.mlp_updates[_layer(image.encoder.measured)])
        sinks = sink_tokens(image)
        return Selection(top_tokens(scores, budget, last=sinks), scores=scores, sinks=sinks)


def _layer(profile: EncoderProfile) -> int:
    start, end = profile.saliency_window or profile.direction_layers
    return (start + end) // 2

"""FasterVLM (Zhang et al., 2024): the tokens that the class token attends to."""

from msdg_vllm.methods.image import Image, Selection, top_tokens
from msdg_vllm.methods.method import Method
from msdg_vllm.methods.needs import Encoder, Needs


class ClsAttention(Method):
    """The highest attention of the class token in the last layer, averaged over heads.

    An encoder without a class token cannot feed it. Waits for no device.
    """

    def needs(self, encoder: Encoder) -> Needs:
        return Needs(class_attention=(encoder.last_layer,))

    def select(self, image: Image, budget: int) -> Selection:
        scores = image.per_token(image.signals.class_attention[image.encoder.last_layer])
        return Selection(top_tokens(scores, budget), scores=scores)

"""What selection is measured with: the sizes of a common model, a layer of its encoder, a clock."""

import time
from collections.abc import Callable

from torch import Tensor

# CLIP-ViT-L/14-336 in front of a 7B language model, a short question.
ENCODER_WIDTH, LLM_WIDTH, NUM_QUERY_TOKENS, RETENTION = 1024, 4096, 16, 0.111
NUM_HEADS, HEAD_WIDTH = 16, 64


def encoder_layer() -> Callable[[Tensor], object]:
    """One CLIP-ViT-L layer with random weights, as Hugging Face transformers runs it."""
    from transformers import CLIPVisionConfig
    from transformers.models.clip.modeling_clip import CLIPEncoderLayer

    config = CLIPVisionConfig(
        hidden_size=ENCODER_WIDTH,
        intermediate_size=4 * ENCODER_WIDTH,
        num_attention_heads=NUM_HEADS,
    )
    config._attn_implementation = "sdpa"
    layer = CLIPEncoderLayer(config).eval()
    return lambda states: layer(states, attention_mask=None)


def milliseconds(action: Callable[[], object]) -> float:
    """Return the processor time of an action, which other processes disturb least."""
    start = time.process_time()
    action()
    return (time.process_time() - start) * 1e3

"""Architecture: a LLaVA-1.5 of small widths, built from stock transformers classes."""

from typing import Any

import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from benchmarks.quality.tokenizer import IMAGE_TOKEN

IMAGE_SIDE = 96
PATCH_SIDE = 8
GRID = IMAGE_SIDE // PATCH_SIDE
NUM_VISUAL_TOKENS = GRID * GRID


def build_llava(tokenizer: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    """Return an untrained model; heads are 32 wide, which vLLM's CPU attention supports."""
    vision = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=12,
        num_attention_heads=4,
        image_size=IMAGE_SIDE,
        patch_size=PATCH_SIDE,
        hidden_act="gelu",
        projection_dim=128,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.get_vocab()[IMAGE_TOKEN],
        projector_hidden_act="gelu",
        vision_feature_select_strategy="default",
        vision_feature_layer=-2,
        image_seq_length=NUM_VISUAL_TOKENS,
        tie_word_embeddings=False,
    )
    model = LlavaForConditionalGeneration(config)
    embeddings = model.get_input_embeddings().weight
    with torch.no_grad():
        # Rows of length one: sums of a few words stay apart from each other in direction.
        embeddings.normal_(0, text.hidden_size**-0.5)
    return model


def encode_pictures(
    model: LlavaForConditionalGeneration, pixels: torch.Tensor, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """Return projected visual tokens `(B, 144, D)`, as the model's own forward computes them.

    The last encoder layer is skipped: LLaVA reads the states that enter it. With `seen`
    `(B, n)` the tower is shown those patches only, in their places.
    """
    tower: Any = model.model.vision_tower
    states = tower.embeddings(pixels)
    if seen is not None:
        places = torch.cat([torch.zeros_like(seen[:, :1]), seen + 1], dim=1)  # class token first
        states = states.gather(1, places.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
    states = tower.pre_layrnorm(states)
    for layer in tower.encoder.layers[:-1]:
        states = layer(states, None)
        states = states[0] if isinstance(states, tuple) else states
    tokens: torch.Tensor = model.model.multi_modal_projector(states[:, 1:])
    return tokens

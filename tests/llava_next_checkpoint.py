"""LLaVA-NeXT in miniature: real tiles of 576 tokens, a real processor, random weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
)

from tests.checkpoints import (
    CHAT_TEMPLATE,
    make_tokenizer,
    rename_tower_weights,
    spread_positions,
    write_profile,
)

TILE = 336
# Those of the published checkpoints, and one more for images of a single tile (height, width).
PINPOINTS = [[336, 336], [336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def make_llava_next(folder: Path, *, seed: int = 0, sink_threshold: float = 4.0) -> Path:
    """24 CLIP layers, 576 tokens per tile, widths of 64."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(["<image>"])
    config = LlavaNextConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=24,
            num_attention_heads=2,
            image_size=TILE,
            patch_size=14,
            projection_dim=64,
            initializer_factor=3.0,
        ),
        text_config=LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=512,
            max_position_embeddings=8192,
            initializer_range=0.2,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=False,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=PINPOINTS,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )
    model = LlavaNextForConditionalGeneration(config).eval()
    with torch.no_grad():
        spread_positions(model.model.vision_tower)
    model.save_pretrained(folder)
    rename_tower_weights(folder)
    LlavaNextProcessor(
        image_processor=LlavaNextImageProcessor(
            size={"shortest_edge": TILE},
            crop_size={"height": TILE, "width": TILE},
            image_grid_pinpoints=PINPOINTS,
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_profile(folder, sink_coordinate=7, sink_threshold=sink_threshold)
    return folder

"""GLM-4.1V in miniature: Qwen's patches and positions, a tower and a tokenizer of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vImageProcessor,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    Glm4vProcessor,
    Glm4vVideoProcessor,
)

from tests.checkpoints import make_tokenizer, write_profile
from tests.qwen_checkpoint import NUM_LAYERS, PROFILE, spread_weights

SPECIAL_TOKENS = [
    "<|user|>",
    "<|assistant|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|image|>",
    "<|video|>",
]
MAX_IMAGE_TOKENS = 300


EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "first_k_dense_replace": 1,
    # As published checkpoints say; vLLM asks for both.
    "head_dim": 32,
    "use_qk_norm": False,
}


def make_glm4v(folder: Path, *, seed: int = 0, experts: bool = False) -> Path:
    """8 vision layers and 2 text layers, widths of 64."""
    tokenizer = make_tokenizer(SPECIAL_TOKENS)
    ids: dict[str, Any] = {
        token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS
    }
    config_class: Any = Glm4vConfig
    model_class: Any = Glm4vForConditionalGeneration
    if experts:
        config_class, model_class = Glm4vMoeConfig, Glm4vMoeForConditionalGeneration
    config = config_class(
        vision_config={
            "depth": NUM_LAYERS,
            "hidden_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "intermediate_size": 128,
            "image_size": 168,
        },
        text_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": 512,
            # As published checkpoints say; vLLM assumes none.
            "attention_bias": True,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 3, 3],
            },
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            **(EXPERTS if experts else {}),
        },
        image_token_id=ids["<|image|>"],
        video_token_id=ids["<|video|>"],
        image_start_token_id=ids["<|begin_of_image|>"],
        image_end_token_id=ids["<|end_of_image|>"],
        video_start_token_id=ids["<|begin_of_video|>"],
        video_end_token_id=ids["<|end_of_video|>"],
        tie_word_embeddings=False,
    )
    model = model_class(config).eval()
    spread_weights(model, seed)
    model.save_pretrained(folder)
    sizes = {"shortest_edge": 112 * 112, "longest_edge": MAX_IMAGE_TOKENS * 28 * 28 * 2}
    processor = Glm4vProcessor(
        image_processor=Glm4vImageProcessor(size=sizes),
        video_processor=Glm4vVideoProcessor(size=sizes),
        tokenizer=tokenizer,
    )
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_profile(folder, **PROFILE, sink_threshold=2.3)
    return folder

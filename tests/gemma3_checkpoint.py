"""Gemma 3 in miniature: a SigLIP tower, an average over patches, local and global layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
    PreTrainedTokenizerFast,
)

from tests.checkpoints import make_tokenizer, rename_tower_weights
from tests.qwen_checkpoint import spread_weights

TOKENS_PER_IMAGE = 144
# Gemma's tokenizer has tokens for runs of newlines, and vLLM looks for them.
NEWLINES = ["\n", "\n\n", "\n\n\n", "\n\n\n\n"]
IMAGE_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}


def make_gemma3(folder: Path, *, seed: int = 0) -> Path:
    """4 vision layers and 2 text layers, one of them local, widths of 64."""
    names = [*IMAGE_TOKENS.values(), *NEWLINES]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(names)._tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=names,
        extra_special_tokens=IMAGE_TOKENS,
    )
    ids: dict[str, Any] = {name: tokenizer.convert_tokens_to_ids(name) for name in names}
    side = 336
    config = Gemma3Config(
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "image_size": side,
            "patch_size": 14,
            "vision_use_head": False,
        },
        text_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "vocab_size": 512,
            "max_position_embeddings": 2048,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 64,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        mm_tokens_per_image=TOKENS_PER_IMAGE,
        boi_token_index=ids[IMAGE_TOKENS["boi_token"]],
        eoi_token_index=ids[IMAGE_TOKENS["eoi_token"]],
        image_token_index=ids[IMAGE_TOKENS["image_token"]],
    )
    model = Gemma3ForConditionalGeneration(config).eval()
    spread_weights(model, seed)
    model.save_pretrained(folder)
    rename_tower_weights(folder)
    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessor(size={"height": side, "width": side}),
        tokenizer=tokenizer,
        image_seq_length=TOKENS_PER_IMAGE,
    )
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

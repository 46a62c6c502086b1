"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 in miniature: 2x2 merging, M-RoPE, random weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from tests.checkpoints import make_tokenizer, write_profile

SPECIAL_TOKENS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUM_LAYERS = 8
PROFILE = {
    "direction_layers": [1, 8],
    "saliency_window": [3, 6],
    "sink_layer": 3,
    "sink_coordinate": 7,
    "num_groups": 6,
    "seed": 0,
}


TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 6, 6],
    },
}


def make_qwen2_5_vl(
    folder: Path,
    *,
    seed: int = 0,
    max_image_tokens: int = 300,
    max_position_embeddings: int = TEXT["max_position_embeddings"],
) -> Path:
    """8 vision layers, two of them with full attention, and 2 text layers, widths of 64."""
    vision = {
        "depth": NUM_LAYERS,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "tokens_per_second": 2,
        "window_size": 112,
        "fullatt_block_indexes": [3, 7],
        "out_hidden_size": 64,
    }
    return _save(
        folder,
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        vision,
        seed,
        max_image_tokens,
        # A few patches in a hundred exceed it, so that pictures have sinks.
        sink_threshold=4.0,
        text={"max_position_embeddings": max_position_embeddings},
    )


def make_qwen2_vl(
    folder: Path,
    *,
    seed: int = 0,
    max_image_tokens: int = 300,
    max_position_embeddings: int = TEXT["max_position_embeddings"],
) -> Path:
    """8 vision layers, all with full attention, and 2 text layers, widths of 64."""
    vision = {
        "depth": NUM_LAYERS,
        "embed_dim": 64,
        "hidden_size": 64,
        "mlp_ratio": 2,
        "num_heads": 2,
    }
    return _save(
        folder,
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        Qwen2VLProcessor,
        vision,
        seed,
        max_image_tokens,
        sink_threshold=2.5,
        text={"max_position_embeddings": max_position_embeddings},
    )


QWEN3_VISION = {
    "depth": NUM_LAYERS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": 64,
    # 12 x 12 learned positions, interpolated to the grid of each item.
    "num_position_embeddings": 144,
}


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}


def make_qwen3_vl(
    folder: Path, *, seed: int = 0, max_image_tokens: int = 300, experts: bool = False
) -> Path:
    """8 vision layers, three of them with DeepStack levels, and 4 text layers, widths of 64."""
    _save(
        folder,
        Qwen3VLMoeConfig if experts else Qwen3VLConfig,
        Qwen3VLMoeForConditionalGeneration if experts else Qwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        {**QWEN3_VISION, "deepstack_visual_indexes": [1, 3, 6]},
        seed,
        max_image_tokens,
        sink_threshold=1.8 if experts else 2.2,
        text={
            "num_hidden_layers": 4,
            "head_dim": 32,
            # Few, so that pruned prompts pass them.
            "max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            # As published checkpoints say; vLLM assumes nothing.
            **({**EXPERTS, "norm_topk_prob": True} if experts else {}),
        },
    )
    if experts:
        # Published checkpoints have inputs before outputs; Hugging Face saves and reads both.
        weights = load_file(folder / "model.safetensors")
        published = {
            name: weight.transpose(1, 2).contiguous() if ".experts." in name else weight
            for name, weight in weights.items()
        }
        save_file(published, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_qwen3_5(
    folder: Path, *, seed: int = 0, max_image_tokens: int = 300, experts: bool = False
) -> Path:
    """8 vision layers without DeepStack, and 4 text layers, one of them with full attention."""
    return _save(
        folder,
        Qwen3_5MoeConfig if experts else Qwen3_5Config,
        Qwen3_5MoeForConditionalGeneration if experts else Qwen3_5ForConditionalGeneration,
        Qwen3VLProcessor,
        QWEN3_VISION,
        seed,
        max_image_tokens,
        sink_threshold=1.5 if experts else 3.0,
        text={
            "num_hidden_layers": 4,
            "head_dim": 64,
            # vLLM's gated delta net takes no narrower heads.
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
                "mrope_section": [3, 3, 2],
                "mrope_interleaved": True,
            },
            **({**EXPERTS, "shared_expert_intermediate_size": 64} if experts else {}),
        },
    )


def _save(
    folder: Path,
    config_class: Any,
    model_class: Any,
    processor_class: Any,
    vision: dict[str, Any],
    seed: int,
    max_image_tokens: int,
    sink_threshold: float,
    text: dict[str, Any] | None = None,
) -> Path:
    tokenizer = make_tokenizer(SPECIAL_TOKENS)
    ids = dict(zip(SPECIAL_TOKENS, tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS), strict=True))
    config = config_class(
        vision_config=vision,
        text_config={
            **TEXT,
            **(text or {}),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    model = model_class(config).eval()
    spread_weights(model, seed)
    model.save_pretrained(folder)
    patch_size = config.vision_config.patch_size
    token_pixels = (2 * patch_size) ** 2
    of_videos: Any = Qwen2VLVideoProcessor
    frames_counted = 1
    pixels: dict[str, Any] = {"patch_size": patch_size}
    if processor_class is Qwen3VLProcessor:
        # Counts the pixels of all frames, not of one.
        of_videos, frames_counted = Qwen3VLVideoProcessor, 6
        # vLLM normalizes images and videos alike.
        pixels |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    processor = processor_class(
        image_processor=Qwen2VLImageProcessor(
            size={
                "shortest_edge": 4 * token_pixels,
                "longest_edge": max_image_tokens * token_pixels,
            },
            **pixels,
        ),
        # Other sizes than for images, as published checkpoints may have them.
        video_processor=of_videos(
            size={
                "shortest_edge": 4 * token_pixels * frames_counted,
                "longest_edge": 40 * token_pixels * frames_counted,
            },
            **pixels,
        ),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_profile(folder, **PROFILE, sink_threshold=sink_threshold)
    return folder


def spread_weights(model: nn.Module, seed: int) -> None:
    """Scale random weights so that tokens, updates and answers differ as trained ones do."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if "norm" in name or "ln_q" in name:
                continue
            if weight.dim() == 1:
                weight.normal_(0, 0.1, generator=generator)
            elif "embed_tokens" in name:
                weight.normal_(0, 1, generator=generator)
            else:
                fan_in = weight.shape[-1] if ".experts." in name else weight[0].numel()
                weight.normal_(0, 1 / math.sqrt(fan_in), generator=generator)

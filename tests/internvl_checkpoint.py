"""InternVL in miniature, in both of its formats: tiles of 36 tokens, random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    PreTrainedTokenizerFast,
)

from tests.checkpoints import make_tokenizer, write_profile
from tests.qwen_checkpoint import spread_weights

TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
SIDE = 168
TOKENS_PER_TILE = (SIDE // 14 // 2) ** 2
NUM_LAYERS = 8


def make_internvl(folder: Path, *, seed: int = 0) -> Path:
    """8 vision layers with a class token and scaled updates, 2 text layers, widths of 64."""
    trained = make_tokenizer(list(TOKENS.values()))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained.backend_tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=TOKENS,
    )
    image_token_id: Any = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    config = InternVLConfig(
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": 2,
            "attention_bias": True,
            "image_size": SIDE,
        },
        text_config={
            "model_type": "qwen2",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": 512,
            "max_position_embeddings": 2048,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "tie_word_embeddings": False,
        },
        image_token_id=image_token_id,
        image_seq_length=TOKENS_PER_TILE,
        tie_word_embeddings=False,
    )
    model = InternVLForConditionalGeneration(config).eval()
    spread_weights(model, seed)
    tower = model.model.vision_tower
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        tower.embeddings.position_embeddings.normal_(0, 1, generator=generator)
        for layer in tower.encoder.layer:
            for scale in (layer.lambda_1, layer.lambda_2):
                scale.uniform_(0.2, 1.5, generator=generator)
    model.save_pretrained(folder)
    processor = InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(
            size={"height": SIDE, "width": SIDE},
            crop_to_patches=True,
            min_patches=1,
            max_patches=6,
        ),
        video_processor=InternVLVideoProcessor(size={"height": SIDE, "width": SIDE}),
        tokenizer=tokenizer,
        image_seq_length=TOKENS_PER_TILE,
    )
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_profile(
        folder,
        direction_layers=[1, 8],
        saliency_window=[3, 6],
        sink_layer=3,
        sink_coordinate=7,
        sink_threshold=3.0,
        num_groups=6,
        seed=0,
    )
    return folder


_CONFIGURATION = """
from transformers import PretrainedConfig, Qwen2Config


class InternVisionConfig(PretrainedConfig):
    model_type = "intern_vit_6b"


class InternVLChatConfig(PretrainedConfig):
    model_type = "internvl_chat"

    def __init__(self, vision_config=None, llm_config=None, **kwargs):
        self.vision_config = InternVisionConfig(**(vision_config or {}))
        self.llm_config = Qwen2Config(**(llm_config or {}))
        super().__init__(**kwargs)
"""


def make_internvl_chat(folder: Path, source: Path) -> Path:
    """The checkpoint of `make_internvl` in InternVL's own format, which brings its own code."""
    config = json.loads((source / "config.json").read_text())
    vision = config["vision_config"]
    chat = {
        "architectures": ["InternVLChatModel"],
        "auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"},
        "model_type": "internvl_chat",
        "vision_config": {
            **{name: vision[name] for name in ("hidden_size", "intermediate_size", "hidden_act")},
            **{name: vision[name] for name in ("num_hidden_layers", "num_attention_heads")},
            "architectures": ["InternVisionModel"],
            "image_size": SIDE,
            "patch_size": 14,
            "qkv_bias": True,
            "qk_normalization": False,
            "layer_norm_eps": vision["layer_norm_eps"],
            "norm_type": "layer_norm",
            "initializer_factor": 0.1,
        },
        "llm_config": {**config["text_config"], "architectures": ["Qwen2ForCausalLM"]},
        "select_layer": -1,
        "force_image_size": SIDE,
        "downsample_ratio": 0.5,
        "ps_version": "v2",
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 6,
        "dynamic_image_size": True,
        "use_thumbnail": True,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(chat, indent=2))
    (folder / "configuration_internvl_chat.py").write_text(_CONFIGURATION)
    weights = load_file(source / "model.safetensors")
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        for old, new in _NEW_NAMES:
            name = name.replace(old, new)
        renamed[name] = tensor
    for layer in range(NUM_LAYERS):
        block = f"vision_model.encoder.layers.{layer}.attn"
        for kind in ("weight", "bias"):
            parts = [renamed.pop(f"{block}.{part}_proj.{kind}") for part in "qkv"]
            renamed[f"{block}.qkv.{kind}"] = torch.cat(parts)
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    for path in source.glob("*token*"):
        shutil.copy(path, folder)
    shutil.copy(source / "msdg_profile.json", folder)
    return folder


_NEW_NAMES = (
    ("vision_tower.", "vision_model."),
    ("multi_modal_projector.layer_norm", "mlp1.0"),
    ("multi_modal_projector.linear_1", "mlp1.1"),
    ("multi_modal_projector.linear_2", "mlp1.3"),
    ("embeddings.cls_token", "embeddings.class_embedding"),
    ("embeddings.position_embeddings", "embeddings.position_embedding"),
    ("embeddings.patch_embeddings.projection", "embeddings.patch_embedding"),
    ("encoder.layer.", "encoder.layers."),
    ("attention.projection_layer", "attn.proj"),
    ("attention.", "attn."),
    ("lambda_1", "ls1"),
    ("lambda_2", "ls2"),
    ("layernorm_before", "norm1"),
    ("layernorm_after", "norm2"),
)

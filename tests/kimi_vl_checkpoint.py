"""Kimi-VL in miniature: a MoonViT tower, a DeepSeek language model without experts.

Transformers has no Kimi-VL; its Kimi-K2.5 has the same tower for a single frame, with the halves of
rotary pairs in another order. The weights of one are written as those of the other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM
from transformers.models.kimi_k25.configuration_kimi_k25 import (
    Kimi_K25Config,
    Kimi_K25VisionConfig,
)
from transformers.models.kimi_k25.modeling_kimi_k25 import (
    Kimi_K25MultimodalProjection,
    Kimi_K25VisionModel,
)

from tests.checkpoints import make_tokenizer
from tests.qwen_checkpoint import spread_weights

PLACEHOLDER = "<|media_pad|>"
PATCH_SIZE = 14
MAX_PATCHES = 1296
HEADS = 2
WIDTH = 64
TEXT: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    # No layer has experts.
    "first_k_dense_replace": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}
VISION: dict[str, Any] = {
    "patch_size": PATCH_SIZE,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 4,
    "hidden_size": WIDTH,
    "intermediate_size": 128,
}

# The processor of a published checkpoint is code in its folder; this one does the same to pixels.
PROCESSOR = """
import math

import numpy as np
import torch
from transformers import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor
from transformers.processing_utils import ProcessorMixin


class KimiVLImageProcessor(BaseImageProcessor):
    model_input_names = ["pixel_values", "image_grid_hws"]

    def __init__(
        self, patch_size=14, merge_kernel_size=(2, 2), in_token_limit=4096, **kwargs
    ):
        super().__init__(**kwargs)
        self.patch_size = patch_size
        self.merge_kernel_size = list(merge_kernel_size)
        self.in_token_limit = in_token_limit

    def preprocess(self, images, return_tensors=None, **kwargs):
        images = images if isinstance(images, (list, tuple)) else [images]
        patches, grids = zip(*map(self._patches, images))
        return BatchFeature(
            {"pixel_values": torch.cat(patches), "image_grid_hws": torch.tensor(grids)}
        )

    def _patches(self, image):
        size, image = self.patch_size, image.convert("RGB")
        count = (image.width // size) * (image.height // size)
        if count > self.in_token_limit:
            scale = math.sqrt(self.in_token_limit / count)
            image = image.resize((int(image.width * scale), int(image.height * scale)))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1
        _, height, width = pixels.shape
        side = size * 2
        pixels = torch.nn.functional.pad(pixels, (0, -width % side, 0, -height % side))
        grid = pixels.shape[1] // size, pixels.shape[2] // size
        cells = pixels.reshape(3, grid[0], size, grid[1], size).permute(1, 3, 0, 2, 4)
        return cells.reshape(-1, 3, size, size), grid


class KimiVLProcessor(ProcessorMixin):
    attributes = ["image_processor", "tokenizer"]
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.image_token = "<|media_pad|>"

    def __call__(self, images=None, text=None, return_tensors=None, **kwargs):
        encoded = self.tokenizer(text, return_tensors="pt") if text is not None else {}
        pixels = self.image_processor.preprocess(images) if images is not None else {}
        return BatchFeature({**encoded, **pixels})
"""


def make_towers() -> tuple[Any, Any]:
    """A tower and a projector of transformers' Kimi-K2.5, for images of one frame."""
    vision = Kimi_K25VisionConfig(**VISION, pos_emb_height=12, pos_emb_width=12)
    config = Kimi_K25Config(
        vision_config=vision,
        text_config=DeepseekV2Config(**TEXT),
        projection_hidden_size=WIDTH,
    )
    return Kimi_K25VisionModel(vision).eval(), Kimi_K25MultimodalProjection(config).eval()


def _interleaved(rows: torch.Tensor) -> torch.Tensor:
    """Rows of a query or key projection with the two halves of each rotary pair side by side."""
    by_head = rows.unflatten(0, (HEADS, 2, -1))
    return by_head.transpose(1, 2).flatten(0, 2)


def _published(tower: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of the tower under the names of a published Kimi-VL."""
    weights: dict[str, torch.Tensor] = {}
    for name, value in tower.items():
        for old, new in (
            ("pos_emb.position_embeddings", "pos_emb.weight"),
            ("layers.", "encoder.blocks."),
            (".norm1.", ".norm0."),
            (".norm2.", ".norm1."),
            (".mlp.fc1.", ".mlp.fc0."),
            (".mlp.fc2.", ".mlp.fc1."),
            ("final_layernorm", "encoder.final_layernorm"),
            (".attn.proj.", ".wo."),
        ):
            name = name.replace(old, new)
        weights[name] = value
    for query in [name for name in weights if ".attn.q_proj." in name]:
        parts = [weights.pop(query.replace("q_proj", f"{kind}_proj")) for kind in "qkv"]
        joined = torch.cat([_interleaved(parts[0]), _interleaved(parts[1]), parts[2]])
        weights[query.replace("attn.q_proj", "wqkv")] = joined
    return weights


def make_kimi_vl(folder: Path, *, seed: int = 0) -> Path:
    """4 vision layers and 2 text layers, widths of 64."""
    folder.mkdir(exist_ok=True)
    tower, projector = make_towers()
    language_model = DeepseekV2ForCausalLM(DeepseekV2Config(**TEXT)).eval()
    for part, module in enumerate((tower, projector, language_model)):
        spread_weights(module, seed + part)
    torch.save(
        {"tower": tower.state_dict(), "projector": projector.state_dict()}, folder / "towers.pt"
    )
    weights = {
        f"language_model.{name}": value for name, value in language_model.state_dict().items()
    }
    language_model.save_pretrained(folder / "language_model")
    for name, value in projector.state_dict().items():
        renamed = name.replace("in_proj", "linear_1").replace("out_proj", "linear_2")
        weights[f"multi_modal_projector.{renamed}"] = value
    for name, value in _published(tower.state_dict()).items():
        weights[f"vision_tower.{name}"] = value
    save_file(
        {name: value.contiguous().clone() for name, value in weights.items()},
        folder / "model.safetensors",
    )
    tokenizer = make_tokenizer([PLACEHOLDER])
    tokenizer.save_pretrained(folder)
    (folder / "processing_kimi_vl.py").write_text(PROCESSOR)
    _write(
        folder / "config.json",
        {
            "architectures": ["KimiVLForConditionalGeneration"],
            "model_type": "kimi_vl",
            "vision_config": {
                **VISION,
                "model_type": "moonvit",
                "init_pos_emb_height": 12,
                "init_pos_emb_width": 12,
                "merge_kernel_size": [2, 2],
            },
            "text_config": DeepseekV2Config(**TEXT).to_dict(),
            "media_placeholder_token_id": tokenizer.convert_tokens_to_ids(PLACEHOLDER),
        },
    )
    classes = {
        "AutoProcessor": "processing_kimi_vl.KimiVLProcessor",
        "AutoImageProcessor": "processing_kimi_vl.KimiVLImageProcessor",
    }
    _write(
        folder / "preprocessor_config.json",
        {
            "auto_map": classes,
            "image_processor_type": "KimiVLImageProcessor",
            "processor_class": "KimiVLProcessor",
            "patch_size": PATCH_SIZE,
            "merge_kernel_size": [2, 2],
            "in_token_limit": MAX_PATCHES,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    )
    return folder


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))

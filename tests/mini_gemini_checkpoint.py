"""Mini-Gemini in miniature, in the names and files of the published checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mistral_common
import torch
from safetensors.torch import save_file
from timm.models.convnext import ConvNeXt
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM

from tests.checkpoints import spread_positions, write_profile

# A SentencePiece vocabulary of 32,000 pieces, as Vicuna's is.
SENTENCEPIECE = Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1"

WIDTH, WIDTH_LANGUAGE = 64, 64
VISION = {
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_hidden_layers": 24,
    "num_attention_heads": 2,
    "image_size": 112,
    "patch_size": 14,
    "projection_dim": 64,
}
VISION_AUX = {"depths": [1, 1, 2, 1], "widths": [16, 32, 48, 64]}
LANGUAGE = {
    "hidden_size": WIDTH_LANGUAGE,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def make_mini_gemini(
    folder: Path, *, hd: bool = False, old_names: bool = False, seed: int = 0
) -> Path:
    """A published checkpoint: 64 tokens per tile, 24 CLIP layers, four ConvNeXt stages.

    Args:
        folder: Where to write it.
        hd: Four cells and the whole image, five tiles; else one tile.
        old_names: Spell the architecture as checkpoints did before it was renamed.
        seed: Of the random weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    weights = {
        **language_weights(),
        **{f"model.vision_tower.vision_tower.{n}": w for n, w in clip_weights().items()},
        **{f"model.vision_tower_aux.{n}": w for n, w in convnext_weights().items()},
        **connector_weights(),
    }
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = {
        **LANGUAGE,
        "architectures": ["MiniGeminiLlamaForCausalLM" if old_names else "MGMLlamaForCausalLM"],
        "model_type": "mini_gemini" if old_names else "mgm",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "mm_vision_tower": "model_zoo/OpenAI/clip-vit-large-patch14-336",
        "mm_vision_tower_aux": "model_zoo/OpenAI/openclip-convnext-large-d-320-laion2B",
        "mm_projector_type": "mlp2x_gelu",
        "mm_hidden_size": WIDTH,
        "mm_hidden_size_aux": sum(VISION_AUX["widths"]),
        "mm_vision_select_layer": -2,
        "mm_vision_select_feature": "patch",
        "mm_use_im_start_end": False,
        "mm_use_im_patch_token": False,
        "image_aspect_ratio": "pad",
        "image_size_aux": 256 if hd else 128,
        "image_grid": 2 if hd else 1,
        "image_global": hd,
        "tokenizer_model_max_length": 2048,
        # Published configurations have no sizes of towers: they are always the large ones.
        "vision_config": VISION,
        "vision_aux_config": VISION_AUX,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    shutil.copy(SENTENCEPIECE, folder / "tokenizer.model")
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                **special,
                "add_bos_token": True,
                "add_eos_token": False,
                "model_max_length": 2048,
                "tokenizer_class": "LlamaTokenizer",
            }
        )
    )
    return folder


def add_profile(folder: Path) -> None:
    """Put the profile of the miniature tower into a prepared folder."""
    write_profile(folder, sink_coordinate=7, sink_threshold=4.0, num_groups=8)


def make_tower_folders(folder: Path, *, seed: int) -> tuple[Path, Path]:
    """Towers of other weights in the files of their publishers: whole CLIPs, text towers too."""
    torch.manual_seed(seed)
    clip, convnext = folder / "clip", folder / "convnext"
    for path in (clip, convnext):
        path.mkdir(parents=True)
    rest = torch.zeros(4)
    torch.save(
        {
            **clip_weights(),
            "text_model.embeddings.token_embedding.weight": rest,
            "text_projection.weight": rest,
            "visual_projection.weight": rest,
            "logit_scale": rest,
            "vision_model.embeddings.position_ids": rest,
        },
        clip / "pytorch_model.bin",
    )
    torch.save(
        {
            **{f"visual.trunk.{n[len('vision_') :]}": w for n, w in convnext_weights().items()},
            "visual.trunk.head.norm.weight": rest,
            "visual.head.mlp.fc1.weight": rest,
            "transformer.resblocks.0.ln_1.weight": rest,
            "logit_scale": rest,
        },
        convnext / "open_clip_pytorch_model.bin",
    )
    return clip, convnext


def language_weights() -> dict[str, torch.Tensor]:
    config = LlamaConfig(**LANGUAGE, initializer_range=0.2)
    return dict(LlamaForCausalLM(config).state_dict())


def clip_weights() -> dict[str, torch.Tensor]:
    tower = CLIPVisionModel(CLIPVisionConfig(**VISION, initializer_factor=3.0))
    with torch.no_grad():
        spread_positions(tower)
    return {
        name if name.startswith("vision_model.") else f"vision_model.{name}": weight
        for name, weight in tower.state_dict().items()
        if not name.endswith("position_ids")
    }


def convnext_weights() -> dict[str, torch.Tensor]:
    tower = ConvNeXt(depths=tuple(VISION_AUX["depths"]), dims=tuple(VISION_AUX["widths"]))
    weights = {}
    for name, weight in tower.state_dict().items():
        if name.startswith(("stem.", "stages.")):
            # timm starts with layer scales near zero, biases of zero and unit norms.
            noise = torch.randn_like(weight)
            weights[f"vision_{name}"] = weight * 5 + noise * 0.2
    return weights


def connector_weights() -> dict[str, torch.Tensor]:
    width_aux = sum(VISION_AUX["widths"])
    sizes = {"query": WIDTH, "aux": width_aux, "val": width_aux}
    modules = {
        **{
            f"vlm_uni_{name}_projector": nn.Sequential(nn.LayerNorm(size), nn.Linear(size, WIDTH))
            for name, size in sizes.items()
        },
        "mm_projector": nn.Sequential(
            nn.Linear(WIDTH, WIDTH_LANGUAGE),
            nn.GELU(),
            nn.Linear(WIDTH_LANGUAGE, WIDTH_LANGUAGE),
        ),
    }
    weights = {}
    for name, module in modules.items():
        for key, weight in module.state_dict().items():
            weights[f"model.{name}.{key}"] = weight * 3 + torch.randn_like(weight) * 0.1
    return weights

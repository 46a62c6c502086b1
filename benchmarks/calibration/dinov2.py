"""Write a DINOv2 ViT-S/14 as a model folder that `msdg-vllm calibrate` reads.

    python -m benchmarks.calibration.dinov2 dinov2s.pt FOLDER

The weights are Meta's, as some packages carry them: a PyTorch file in the original layout, with
registers or without.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Dinov2Config, Dinov2WithRegistersConfig

_LAYERS, _WIDTH, _SIDE = 12, 384, 336
_NAMES = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "register_tokens": "embeddings.register_tokens",
    "mask_token": "embeddings.mask_token",
    "patch_embed.proj.": "embeddings.patch_embeddings.projection.",
    "blocks.": "encoder.layer.",
    "norm.": "layernorm.",
    ".attn.proj.": ".attention.o_proj.",
    ".ls1.gamma": ".layer_scale1.lambda1",
    ".ls2.gamma": ".layer_scale2.lambda1",
}


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under Hugging Face's names, attention in three parts."""
    made: dict[str, Tensor] = {}
    for name, weight in weights.items():
        for old, new in _NAMES.items():
            name = name.replace(old, new) if old.startswith(".") or name.startswith(old) else name
        if ".attn.qkv." in name:
            parts = zip("qkv", weight.chunk(3), strict=True)
            for part, chunk in parts:
                made[name.replace("attn.qkv", f"attention.{part}_proj")] = chunk.contiguous()
        else:
            made[name] = weight.contiguous()
    return made


def write_model(weights: dict[str, Tensor], folder: Path) -> None:
    """Write weights, configuration and image processor; 24 x 24 patches as LLaVA has them."""
    kind = Dinov2WithRegistersConfig if "register_tokens" in weights else Dinov2Config
    config = kind(
        hidden_size=_WIDTH,
        num_hidden_layers=_LAYERS,
        num_attention_heads=6,
        patch_size=14,
        image_size=518,
    )
    config.save_pretrained(folder)
    save_file(renamed(weights), folder / "model.safetensors")
    processor = {
        "image_processor_type": "BitImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": _SIDE},
        "do_center_crop": True,
        "crop_size": {"height": _SIDE, "width": _SIDE},
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write_model(torch.load(arguments.weights, "cpu", weights_only=True), arguments.folder)


if __name__ == "__main__":
    main()

"""Export: a training checkpoint as a folder that stock transformers and stock vLLM load."""

import argparse
import hashlib
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    CLIPImageProcessor,
    GenerationConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from benchmarks.quality.architecture import IMAGE_SIDE, PATCH_SIDE, build_llava
from benchmarks.quality.tokenizer import CHAT_TEMPLATE, build_tokenizer
from benchmarks.quality.train import CLIP_MEAN, CLIP_STD, RUNS

MODELS = Path(__file__).parents[2] / "models"
WEIGHTS = "model.safetensors"
HASHES = "SHA256SUMS"
_MAX_BYTES = 12_000_000


def build_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """Return the processor; a picture of any form is squashed to the square the tower sees."""
    side = {"height": IMAGE_SIDE, "width": IMAGE_SIDE}
    images = CLIPImageProcessor(
        size=side,
        crop_size=side,
        do_center_crop=False,
        image_mean=list(CLIP_MEAN),
        image_std=list(CLIP_STD),
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH_SIDE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )


def export(model: LlavaForConditionalGeneration, folder: Path) -> None:
    """Write weights in half precision, config, tokenizer, processor and the weights' hash.

    The config asks for float32 all the same: on a CPU half precision is five times slower.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    model = model.half()
    model.config.dtype = torch.float32
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=8,
        do_sample=False,
    )
    model.config.architectures = ["LlavaForConditionalGeneration"]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    weights = {_published_name(name): tensor for name, tensor in model.state_dict().items()}
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    build_processor(tokenizer).save_pretrained(folder)
    size = (folder / WEIGHTS).stat().st_size
    if size > _MAX_BYTES:
        raise ValueError(f"weights must be at most {_MAX_BYTES} bytes, got {size}")
    (folder / HASHES).write_text(f"{sha256(folder / WEIGHTS)}  {WEIGHTS}\n")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _published_name(name: str) -> str:
    """Name a weight as LLaVA-1.5's published checkpoints do; both libraries map these."""
    for ours, published in (
        ("model.vision_tower.", "vision_tower.vision_model."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
    ):
        if name.startswith(ours):
            return published + name.removeprefix(ours)
    raise ValueError(f"no published name for weight {name!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=RUNS / "pictures.pt")
    parser.add_argument("--output", type=Path, default=MODELS / "scenes-llava")
    arguments = parser.parse_args()
    model = build_llava(build_tokenizer())
    saved = torch.load(arguments.checkpoint, weights_only=True)
    model.load_state_dict(saved["model"])
    export(model, arguments.output)
    print(f"step {saved['step']} of {arguments.checkpoint.name} written to {arguments.output}")


if __name__ == "__main__":
    main()

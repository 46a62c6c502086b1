"""Export: a training checkpoint as a folder that stock transformers and stock vLLM load."""

import argparse
import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig

from benchmarks.shared.provenance import ROOT
from training.families import FAMILIES, Family
from training.stages import STAGES
from training.train import run_folder

MODELS = ROOT / "models"
WEIGHTS = "model.safetensors"
HASHES = "SHA256SUMS"
_MAX_BYTES = 12_000_000


def export(family: Family, model: Any, folder: Path) -> None:
    """Write weights in half precision, config, tokenizer, processor and the weights' hash.

    The config asks for float32 all the same: on a CPU half precision is five times slower.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = family.tokenizer()
    model = model.half()
    model.config.dtype = torch.float32
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=8,
        do_sample=False,
    )
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    weights = {family.published_name(name): weight for name, weight in model.state_dict().items()}
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)  # readable by whoever serves it
    family.processor(tokenizer).save_pretrained(folder)
    size = (folder / WEIGHTS).stat().st_size
    if size > _MAX_BYTES:
        raise ValueError(f"weights must be at most {_MAX_BYTES} bytes, got {size}")
    (folder / HASHES).write_text(f"{sha256(folder / WEIGHTS)}  {WEIGHTS}\n")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(FAMILIES), default="llava")
    parser.add_argument("--checkpoint", type=Path, help="default: the end of its training")
    parser.add_argument("--output", type=Path, help="default: models/scenes-MODEL")
    arguments = parser.parse_args()
    family = FAMILIES[arguments.model]
    checkpoint = arguments.checkpoint or run_folder(arguments.model) / f"{STAGES[-1].name}.pt"
    output = arguments.output or MODELS / f"scenes-{arguments.model}"
    model = family.build(family.tokenizer())
    saved = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(saved["model"])
    export(family, model, output)
    print(f"step {saved['step']} of {checkpoint.name} written to {output}")


if __name__ == "__main__":
    main()

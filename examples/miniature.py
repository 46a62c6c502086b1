"""Make a LLaVA-1.5 in miniature: the real architecture, tokenizer and processor, random weights.

It shows that everything works (counts, caches, positions, metrics); what it says means nothing.

    python examples/miniature.py models/miniature-llava
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

CORPUS = """
What is on the left of the red square? Which colour has the small triangle next to the number?
Is there a blue circle in the picture? How many green stars are there? Read the code on the sign.
Describe the image in detail, then answer with a single word or phrase. The quick brown fox jumps
over the lazy dog. A chat between a curious user and an artificial intelligence assistant.
""".strip()

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'][0]['text'] }} {% else %}"
    "{{ message['role'].upper() }}: "
    "{% for part in message['content'] if part['type'] == 'image' %}<image>\n{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{{ ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def make_tokenizer(special_tokens: list[str], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on a few sentences; it encodes any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<s>", "</s>", *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=special_tokens,
    )


def make_llava(
    folder: Path,
    *,
    seed: int = 0,
    image_size: int = 336,
    vision: Mapping[str, Any] | None = None,
    text: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """LLaVA-1.5 in miniature: 24 CLIP layers, 576 visual tokens, widths of 64.

    `vision` and `text` replace values of the two configs, for larger ones.
    """
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(["<image>"])
    image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    vision_values = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 24,
        "num_attention_heads": 2,
        "image_size": image_size,
        "patch_size": 14,
        "projection_dim": 64,
        "initializer_factor": 3.0,
    }
    text_values = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
    }
    vision_config = CLIPVisionConfig(**{**vision_values, **(vision or {})})
    text_config = LlamaConfig(**{**text_values, **(text or {})})
    config = LlavaConfig(
        vision_config=vision_config,
        text_config=text_config,
        image_token_index=image_token_id,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )
    model = LlavaForConditionalGeneration(config).eval().to(dtype)
    with torch.no_grad():
        spread_positions(model.model.vision_tower)
    model.save_pretrained(folder)
    rename_tower_weights(folder)
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": image_size},
            crop_size={"height": image_size, "width": image_size},
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # A threshold that some twenty of the 576 tokens exceed.
    write_profile(folder, sink_threshold=4.0)
    return folder


def spread_positions(tower: torch.nn.Module) -> None:
    """Scale position embeddings up, so that tokens of a random tower differ as trained ones do."""
    embeddings = tower.embeddings if hasattr(tower, "embeddings") else tower.vision_model.embeddings
    embeddings.position_embedding.weight.mul_(20)


def rename_tower_weights(folder: Path) -> None:
    """Give CLIP weights the names that published LLaVA checkpoints have."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    renamed = {}
    for name, tensor in weights.items():
        if "vision_tower." in name and "vision_tower.vision_model." not in name:
            name = name.replace("vision_tower.", "vision_tower.vision_model.")
        renamed[name] = tensor
    save_file(renamed, path, metadata={"format": "pt"})


def write_profile(folder: Path, **overrides: object) -> None:
    """Put an encoder profile beside the weights, as a bundled model has it."""
    profile = {
        "direction_layers": [2, 23],
        "saliency_window": [14, 19],
        "sink_layer": 12,
        "sink_coordinate": 7,
        "sink_threshold": 50.0,
        "num_groups": 20,
        "seed": 0,
        **overrides,
    }
    (folder / "msdg_profile.json").write_text(json.dumps(profile, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="where to write the checkpoint")
    folder = parser.parse_args().folder
    make_llava(folder)
    print(f"{folder}: LLaVA-1.5 in miniature, 576 visual tokens per image, random weights")


if __name__ == "__main__":
    main()

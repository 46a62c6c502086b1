"""Makes a published Mini-Gemini checkpoint servable.

    python -m msdg_vllm.models.mini_gemini.prepare SOURCE TARGET

Published folders lack what a server needs: a token for images and a chat template. The new folder
has both; the weights are linked into it, not copied.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from transformers import AddedToken, LlamaTokenizer

from msdg_vllm.models.mini_gemini.config import MGMConfig, MiniGeminiConfig
from msdg_vllm.models.mini_gemini.processor import IMAGE_TOKEN

_MODEL_TYPES = (MGMConfig.model_type, MiniGeminiConfig.model_type)

# The format of Vicuna 1.5, which the published models were tuned with.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- if messages and messages[0].role == 'system' -%}
{%- set system, turns = messages[0].content, messages[1:] -%}
{%- else -%}
{%- set turns = messages -%}
{%- set system = "A chat between a curious user and an artificial intelligence assistant. " ~
    "The assistant gives helpful, detailed, and polite answers to the user's questions." -%}
{%- endif -%}
{%- macro text_of(content) -%}
{%- if content is string -%}{{ content }}{%- else -%}
{%- for part in content if part.type == 'image' -%}{{ '<image>\\n' }}{%- endfor -%}
{%- for part in content if part.type == 'text' -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{- text_of(system) ~ ' ' -}}
{%- for turn in turns -%}
{%- if turn.role == 'user' -%}{{ 'USER: ' ~ text_of(turn.content) ~ ' ' }}
{%- else -%}{{ 'ASSISTANT: ' ~ text_of(turn.content) ~ eos_token }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}
"""


class PreparationError(ValueError):
    """A folder that cannot be prepared."""


def prepare(
    source: Path,
    target: Path,
    *,
    clip_folder: Path | None = None,
    convnext_folder: Path | None = None,
) -> None:
    """Write a servable folder.

    Args:
        source: A folder with a published checkpoint.
        target: The folder to write; must not hold a checkpoint yet.
        clip_folder: Take the low-resolution tower from here, not from the checkpoint.
        convnext_folder: Take the high-resolution tower from here, not from the checkpoint.
    """
    config = _read_config(source)
    if (target / "config.json").exists():
        raise PreparationError(f"{target} already holds a checkpoint; name a new folder")
    weights = [
        path
        for pattern in ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
        for path in sorted(source.glob(pattern))
        if path.name != "training_args.bin"
    ]
    if not any(path.suffix in (".safetensors", ".bin") for path in weights):
        raise PreparationError(
            f"{source} holds no *.safetensors and no *.bin; download the weights"
        )
    for key, folder in (
        ("vision_tower_folder", clip_folder),
        ("vision_tower_aux_folder", convnext_folder),
    ):
        if folder is not None:
            if not folder.is_dir():
                raise PreparationError(f"{folder} is no folder; give the folder of the tower")
            config[key] = str(folder.resolve())

    target.mkdir(parents=True, exist_ok=True)
    config["image_token_index"] = _write_tokenizer(source, target, config["vocab_size"])
    for path in weights:
        (target / path.name).symlink_to(path.resolve())
    # Last: a folder without it is visibly not finished.
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _read_config(source: Path) -> dict[str, object]:
    path = source / "config.json"
    if not path.is_file():
        raise PreparationError(f"{source} holds no config.json; give the folder of a checkpoint")
    config: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    if config.get("model_type") not in _MODEL_TYPES:
        raise PreparationError(
            f"{source} is of model type {config.get('model_type')!r}; Mini-Gemini checkpoints "
            f"are {' or '.join(_MODEL_TYPES)}"
        )
    return config


def _write_tokenizer(source: Path, target: Path, vocab_size: object) -> int:
    """Write the tokenizer with a token for images and return its id."""
    tokenizer = LlamaTokenizer.from_pretrained(source)
    tokenizer.add_tokens([AddedToken(IMAGE_TOKEN, special=True, normalized=False)])
    image_token_id = int(tokenizer.convert_tokens_to_ids(IMAGE_TOKEN))
    if image_token_id != vocab_size:
        raise PreparationError(
            f"the tokenizer gives {IMAGE_TOKEN} the id {image_token_id}, but it must be the first "
            f"behind the vocabulary, {vocab_size}; is this the tokenizer of the checkpoint?"
        )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(target)
    # The models were tuned on texts that were cut at the image and tokenised piece by piece, so
    # that a lone space follows it. Only legacy mode does that, and saving forgets it.
    path = target / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**settings, "legacy": True}, indent=2) + "\n", encoding="utf-8")
    return image_token_id


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m msdg_vllm.models.mini_gemini.prepare",
        description="Make a published Mini-Gemini checkpoint servable by vLLM.",
    )
    parser.add_argument("source", type=Path, help="folder of the downloaded checkpoint")
    parser.add_argument("target", type=Path, help="folder to write; weights are linked into it")
    parser.add_argument(
        "--clip-folder",
        type=Path,
        help="folder of clip-vit-large-patch14-336, to use its weights for the low-resolution "
        "tower (default: those inside the checkpoint)",
    )
    parser.add_argument(
        "--convnext-folder",
        type=Path,
        help="folder of the OpenCLIP ConvNeXt-Large, to use its weights for the high-resolution "
        "tower (default: those inside the checkpoint)",
    )
    options = parser.parse_args(arguments)
    try:
        prepare(
            options.source,
            options.target,
            clip_folder=options.clip_folder,
            convnext_folder=options.convnext_folder,
        )
    except PreparationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    config = json.loads((options.source / "config.json").read_text(encoding="utf-8"))
    length = config.get("tokenizer_model_max_length", 2048)
    print(f"{options.target} is ready. Serve it with:")
    print(f"  msdg-vllm serve {options.target} --max-model-len {length}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How much KV cache an image takes, by model and retention, and how many images fit into a GiB.

python -m deploy.sizing                                    # the table of docs/deployment.md
python -m deploy.sizing --config FOLDER --tokens 1296      # any other model
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msdg_vllm.core.budget import num_kept_tokens

RETENTIONS = (1.0, 0.333, 0.222, 0.111)
BYTES_PER_NUMBER = 2  # bfloat16 or float16, what the checkpoints are published in
MIB = 1024**2
GIB = 1024**3


@dataclass(frozen=True, slots=True)
class ImageLoad:
    """What one image is to a model.

    Attributes:
        name: Model and image, as the table calls them.
        text_config: The language model's part of the published config.json.
        tiles: Visual tokens of each tile; the budget is spent tile by tile.
        separators: Tokens between rows of tiles, which only an unpruned image has.
    """

    name: str
    text_config: Mapping[str, Any]
    tiles: tuple[int, ...]
    separators: int = 0

    def num_tokens(self, retention: float) -> int:
        """Return the visual tokens that reach the language model."""
        kept = sum(num_kept_tokens(tokens, retention) for tokens in self.tiles)
        return kept + (self.separators if kept == sum(self.tiles) else 0)

    def kv_bytes(self, retention: float) -> int:
        """Return the bytes that these tokens take in the KV cache."""
        return self.num_tokens(retention) * kv_bytes_per_token(self.text_config)


def kv_bytes_per_token(text_config: Mapping[str, Any]) -> int:
    """Return the size of one token's keys and values in all layers."""
    heads = text_config["num_attention_heads"]
    head_size = text_config.get("head_dim") or text_config["hidden_size"] // heads
    kv_heads = text_config.get("num_key_value_heads") or heads
    return int(2 * text_config["num_hidden_layers"] * kv_heads * head_size * BYTES_PER_NUMBER)


_LLAMA_7B = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
_LLAMA_13B = {"num_hidden_layers": 40, "num_attention_heads": 40, "hidden_size": 5120}
_QWEN_3B = {"num_hidden_layers": 36, "num_attention_heads": 16, "hidden_size": 2048}
_QWEN_3B |= {"num_key_value_heads": 2}
_QWEN_7B = {"num_hidden_layers": 28, "num_attention_heads": 28, "hidden_size": 3584}
_QWEN_7B |= {"num_key_value_heads": 4}

MODELS = (
    ImageLoad("LLaVA-1.5-7B", _LLAMA_7B, (576,)),
    ImageLoad("LLaVA-1.5-13B", _LLAMA_13B, (576,)),
    # Two by two tiles and the whole image; a separator ends each of the canvas' 48 rows.
    ImageLoad("LLaVA-NeXT-7B (Vicuna), 672 x 672", _LLAMA_7B, (576,) * 5, separators=48),
    ImageLoad("Mini-Gemini-7B", _LLAMA_7B, (576,)),
    ImageLoad("Mini-Gemini-7B-HD", _LLAMA_7B, (576,) * 5),
    # One token per 28 x 28 pixels.
    ImageLoad("Qwen2.5-VL-3B, 1008 x 1008", _QWEN_3B, (36 * 36,)),
    ImageLoad("Qwen2.5-VL-7B, 1008 x 1008", _QWEN_7B, (36 * 36,)),
)


def table(loads: Iterable[ImageLoad] = MODELS) -> Iterator[str]:
    """Yield the lines of a Markdown table: per retention tokens, MiB per image, images per GiB."""
    yield "| model, image | KiB per token | " + " | ".join(map(_heading, RETENTIONS)) + " |"
    yield "|---" * (2 + len(RETENTIONS)) + "|"
    for load in loads:
        kib = kv_bytes_per_token(load.text_config) / 1024
        cells = " | ".join(_cell(load, retention) for retention in RETENTIONS)
        yield f"| {load.name} | {kib:g} | {cells} |"


def _heading(retention: float) -> str:
    return f"retention {retention}"


def _cell(load: ImageLoad, retention: float) -> str:
    size = load.kv_bytes(retention)
    images = GIB / size
    return f"{load.num_tokens(retention):,} t, {_rounded(size / MIB)} MiB, **{_rounded(images)}**"


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config.get("text_config") or config


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of the known models, or of one whose config.json is given."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.sizing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, metavar="FOLDER", help="folder with a config.json")
    parser.add_argument(
        "--tokens",
        type=int,
        help="visual tokens of an image without pruning, as usage.prompt_tokens_details."
        "visual_tokens_total of an answer says",
    )
    options = parser.parse_args(argv)
    if (options.config is None) != (options.tokens is None):
        parser.error("--config and --tokens go together")
    loads: Sequence[ImageLoad] = MODELS
    if options.config:
        try:
            config = _read_config(options.config)
            loads = [ImageLoad(options.config.name, config, (options.tokens,))]
            kv_bytes_per_token(config)
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"{options.config}/config.json cannot be used: {error!r}")
    print("\n".join(table(loads)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Where tests take their tiny checkpoints from: the example that `make serve` can serve too."""

from examples.miniature import (
    CHAT_TEMPLATE,
    make_llava,
    make_tokenizer,
    rename_tower_weights,
    spread_positions,
    write_profile,
)

__all__ = [
    "CHAT_TEMPLATE",
    "make_llava",
    "make_tokenizer",
    "rename_tower_weights",
    "spread_positions",
    "write_profile",
]

"""How far the positions of a pruned prompt reach, and how far the decoder's RoPE table does.

Kept tokens keep their positions, so that a short prompt can reach positions that no prompt
without pruning ever had. vLLM looks them up in a table without asking: beyond its end the whole
engine would die, not the request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from msdg_vllm.core.errors import RequestError

# vLLM's M-RoPE tables have this many times the positions that a checkpoint names. Newer decoders
# have it only while positions are carried by embeddings, which they are here.
_TABLE_FACTOR = 4


class Span(NamedTuple):
    """An image or video in a prompt: where it starts, its tokens there, and its positions."""

    offset: int
    length: int
    extent: int


def table_size(text_config: Any) -> int:
    """Positions in the decoder's table."""
    rope: Any = getattr(text_config, "rope_parameters", None) or {}
    size = text_config.max_position_embeddings
    if rope.get("rope_type") == "yarn":
        size = rope.get("original_max_position_embeddings", size) * rope["factor"]
    return int(size * _TABLE_FACTOR)


def check_positions(spans: Iterable[Span], max_model_len: int, limit: int) -> None:
    """Raise `RequestError` when a prompt, or an answer to it, could pass the table's end."""
    shift = reach = 0
    for span in sorted(spans):
        reach = max(reach, span.offset + shift + span.extent)
        shift += span.extent - span.length
    reach = max(reach, max_model_len + shift)
    if reach > limit:
        raise RequestError(
            f"kept tokens keep their positions, and those of these images and videos reach "
            f"{reach} with an answer as long as --max-model-len {max_model_len} allows; this "
            f"model knows positions up to {limit}. Send fewer or smaller images, or send them in "
            "several requests",
            parameter="messages",
        )

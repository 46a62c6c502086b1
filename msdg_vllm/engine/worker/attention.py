"""What attention says about patches, from the queries and keys on their way into the fused kernel.

Fused kernels give no attention weights away. Their inputs are all that is needed to compute one
row, or the column sums, of a single layer once more; the kernel itself runs as it always does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.distributed import tensor_model_parallel_all_reduce

Spans = Sequence[tuple[int, int]]
"""Parts of a sequence whose tokens see each other and no others, as (start, stop)."""

# Bytes of the attention weights that column sums hold at once, by type of device: a GPU wants few
# launches, a CPU weights that stay in its cache.
_TILE_BYTES = {"cpu": 8 * 2**20}
_OTHER_TILE_BYTES = 64 * 2**20


def class_attention(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of the first token to every token, summed over heads: `(R, T)` float32.

    Args:
        query: `(R, T, heads, width)`.
        key: The same.
        scale: What products are multiplied by.
    """
    rows = []
    # Image by image, so that the bits do not depend on what else is in the batch.
    for q, k in zip(query[:, 0], key, strict=True):
        weights = torch.einsum("hc,thc->ht", q.float() * scale, k.float()).softmax(dim=-1)
        rows.append(weights.sum(dim=0))
    return torch.stack(rows)


def received_attention(
    query: torch.Tensor, key: torch.Tensor, scale: float, spans: Spans
) -> torch.Tensor:
    """Attention that every token receives, summed over heads and queries: `(R, T)` float32.

    Exact, and never the whole map at once.

    Args:
        query: `(R, T, heads, width)`.
        key: The same.
        scale: What products are multiplied by.
        spans: Which tokens see each other.
    """
    tile_bytes = _TILE_BYTES.get(query.device.type, _OTHER_TILE_BYTES)
    received = query.new_zeros(query.shape[:2], dtype=torch.float32)
    for row, (q, k) in enumerate(zip(query, key, strict=True)):
        for start, stop in spans:
            keys = k[start:stop].float().permute(1, 2, 0)  # (heads, width, S)
            step = max(1, tile_bytes // (4 * keys.shape[0] * (stop - start)))
            for first in range(start, stop, step):
                queries = q[first : min(first + step, stop)].float().transpose(0, 1) * scale
                weights = torch.bmm(queries, keys).softmax(dim=-1)  # (heads, step, S)
                received[row, start:stop] += weights.sum(dim=(0, 1))
    return received


def over_all_ranks(values: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Add up what each tensor-parallel rank knows of its own heads."""
    if num_ranks == 1:
        return values
    total: torch.Tensor = tensor_model_parallel_all_reduce(values)
    return total

"""Whole tiles: matrix sizes for which a product's bits do not depend on where its rows stand.

Tokens with equal states must get equal similarities, or rounding would decide a tie instead of
the order. A matrix product treats all entries of a full tile alike, but may add up in another
order at the edge of a matrix, and for rows that do not start on a 16-byte boundary. Zeros change
no inner product, so both operands are filled up with zeros to whole tiles. The widths of real
encoders and language models are whole tiles already; then nothing is copied.
"""

import torch.nn.functional as F
from torch import Tensor

# Floats in the widest vector register in use (AVX-512); a multiple of 16 bytes.
TILE = 16
# Centroids and query tokens are few: full tiles of 16 would be mostly wasted work.
NARROW_TILE = 4
# Tokens that are handled together where several passes over them follow one another: what they
# need then stays in the cache of a CPU.
BLOCK = 1024


def round_up(size: int, tile: int) -> int:
    """Return the smallest multiple of `tile` that is at least `size`."""
    return -(-size // tile) * tile


def fill_up(matrix: Tensor, num_rows: int) -> Tensor:
    """Return `(n, d)` with zeros added up to `num_rows` rows and to a width of whole tiles."""
    rows, width = matrix.shape
    padding = (0, round_up(width, TILE) - width, 0, num_rows - rows)
    return F.pad(matrix, padding) if any(padding) else matrix


def token_blocks(num_tokens: int) -> list[slice]:
    """Return the blocks that `num_tokens` tokens are handled in; the number alone decides."""
    return [slice(start, min(start + BLOCK, num_tokens)) for start in range(0, num_tokens, BLOCK)]

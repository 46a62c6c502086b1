"""Sending a smaller image: the image is scaled down before the encoder, alone or before MSDG-Prune.

What the encoder then gives costs less in the encoder, in selection and in the language model.
"""

import math
from fractions import Fraction

import torch

from msdg_vllm.methods.image import Image, Selection, top_tokens
from msdg_vllm.methods.method import Method
from msdg_vllm.methods.msdg import Msdg
from msdg_vllm.methods.needs import Encoder, Needs


class Resize(Method):
    """The image at the largest size that has no more tokens than the budget, all of them kept.

    So the budget that `select` sees is all that the scaled image has. Waits for no device.
    """

    def needs(self, encoder: Encoder) -> Needs:
        return Needs(scaling=True)

    def encoder_tokens(self, num_tokens: int, budget: int) -> int:
        return budget

    def select(self, image: Image, budget: int) -> Selection:
        scores = torch.zeros(image.num_tokens, device=image.visual.device)
        return Selection(top_tokens(scores, budget))


class ResizeMsdg(Msdg):
    """MSDG-Prune on an image that was scaled down by half of the saving.

    Half as a factor: to 1/9 of the tokens, the image is scaled to 1/3 of them, and 1/3 of those
    are selected.
    """

    def needs(self, encoder: Encoder) -> Needs:
        return super().needs(encoder) | Needs(scaling=True)

    def encoder_tokens(self, num_tokens: int, budget: int) -> int:
        return math.isqrt(num_tokens * budget)


def scaled_grid(rows: int, columns: int, most: int) -> tuple[int, int]:
    """Return the largest grid of at most `most` tokens that keeps the shape of `rows` x `columns`.

    Sides are those of the grid at one scale, rounded down to whole tokens, at least 1: what Qwen's
    own preprocessing does for a limit of pixels. Of equally large grids the one whose sides are
    nearest in proportion, then the one with more columns.
    """
    grids = []
    for r in range(1, min(rows, most) + 1):
        # At the scales that give r rows there are this many columns.
        fewest = 1 if r == 1 else max(1, r * columns // rows)
        widest = min(max(1, -(-(r + 1) * columns // rows) - 1), columns, most // r)
        if widest >= fewest:
            grids.append((r, widest))

    def rank(grid: tuple[int, int]) -> tuple[int, Fraction, int]:
        stretch = Fraction(grid[0] * columns, grid[1] * rows)
        return grid[0] * grid[1], -max(stretch, 1 / stretch), grid[1]

    return max(grids, key=rank)

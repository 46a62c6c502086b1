"""Patch info mining: each token takes what it needs from the high-resolution square behind it.

A token attends to the positions of its own square alone, so any subset of tokens can be mined,
with the same result for each as when all are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


def squares_of(maps: torch.Tensor, side: int) -> torch.Tensor:
    """View high-resolution maps as the squares behind the tokens.

    Args:
        maps: `(.., C, H, W)`, H = W a multiple of `side`.
        side: Tokens along one side.

    Returns:
        `(.., side, side, cell, cell, C)`: rows and columns of tokens, then of positions.
    """
    cell = maps.shape[-1] // side
    squares = maps.unflatten(-1, (side, cell)).unflatten(-3, (side, cell))
    return squares.movedim(-5, -1).transpose(-4, -3)


class PatchInfoMining(nn.Module):
    """One-headed attention of each token over its square, added to the token.

    Written with the key and the value projection moved off the positions: the terms of the key
    that are the same for all positions cancel in the softmax, and the weights of the softmax add
    up to one, so the value projection can follow the sum. For CLIP-ViT-L and ConvNeXt-Large that
    is a sixtieth of the arithmetic, and no key or value per position is ever stored.
    """

    def __init__(self, width: int, width_aux: int) -> None:
        super().__init__()
        self.vlm_uni_query_projector, self.vlm_uni_aux_projector, self.vlm_uni_val_projector = (
            nn.Sequential(nn.LayerNorm(width_in), nn.Linear(width_in, width))
            for width_in in (width, width_aux, width_aux)
        )

    def forward(self, tokens: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        """Return the filled tokens, `(.., d)`.

        Args:
            tokens: CLIP features, `(.., d)`.
            squares: What lies behind each, `(.., positions, C)`.
        """
        key_norm: Any
        key_norm, key = self.vlm_uni_aux_projector
        value_norm, value = self.vlm_uni_val_projector
        queries = self.vlm_uni_query_projector(tokens)  # (.., d)
        positions = functional.layer_norm(squares, squares.shape[-1:], eps=key_norm.eps)
        weights = (queries @ key.weight) * key_norm.weight  # (.., C)
        logits = (positions @ weights.unsqueeze(-1)).squeeze(-1) / queries.shape[-1] ** 0.5
        attention = logits.float().nan_to_num().softmax(dim=-1).to(positions.dtype)
        mined = (attention.unsqueeze(-2) @ positions).squeeze(-2)  # (.., C)
        mined = mined * value_norm.weight + value_norm.bias
        filled: torch.Tensor = tokens + value(mined)
        return filled

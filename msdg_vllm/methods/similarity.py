"""Cosines between the tokens of an image, a row or a block at a time.

A matrix of tokens by tokens is held only where it is no larger than the tokens themselves. Equal
tokens get equal cosines, so that their order decides and not the rounding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from msdg_vllm.core import kernels
from msdg_vllm.core.grouping import SAME_DIRECTION
from msdg_vllm.core.signals import row_norms, unit
from msdg_vllm.core.tiles import TILE, fill_up, round_up

_BLOCK = 512


def snap(cosines: Tensor) -> Tensor:
    """Set to 1, in place, the cosines that float32 cannot tell from it; return them."""
    return cosines.masked_fill_(cosines > SAME_DIRECTION, 1.0)


@dataclass(frozen=True, slots=True)
class UnitTokens:
    """Tokens at unit length.

    Attributes:
        units: `(N', D')` float32, filled up with zeros to whole tiles; zero where a token is
            zero or not finite.
        finite: `(N,)`, True for tokens whose norm is finite.
    """

    units: Tensor
    finite: Tensor

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.finite.shape[0]

    @classmethod
    def of(cls, tokens: Tensor) -> "UnitTokens":
        """Return the tokens `(N, D)`, of any floating type, at unit length."""
        num_tokens = tokens.shape[0]
        tokens = fill_up(tokens.float(), round_up(num_tokens, TILE))
        norms = row_norms(tokens)
        finite = norms.isfinite()
        units = unit(tokens, norms).masked_fill_(~finite.unsqueeze(-1), 0.0)
        return cls(units, finite[:num_tokens])

    def cosines_to(self, direction: Tensor) -> Tensor:
        """Return the cosine of each token to a unit vector `(D',)`: `(N,)`."""
        return snap(torch.mv(self.units, direction)[: self.num_tokens])

    def cosines_to_token(self, index: Tensor, pairs: Tensor | None = None) -> Tensor:
        """Return the cosine of each token to the token number `index` `(1,)`: `(N,)`."""
        if pairs is not None:
            return pairs.index_select(0, index).squeeze(0)[: self.num_tokens]
        return self.cosines_to(self.units.index_select(0, index).squeeze(0))

    def pairs(self) -> Tensor | None:
        """Return the cosines of all pairs, `(N', N')`, or None if they are more than the tokens.

        Kernels can do without them, and faster where they are many.
        """
        num_rows, most = self.units.shape
        if kernels.run_on(self.units.device):
            most = min(most, kernels.MAX_PAIRED_TOKENS)
        return snap(self.units @ self.units.T) if num_rows <= most else None

    def nearest_cosine(self, pairs: Tensor | None) -> Tensor:
        """Return each token's highest cosine to another finite token, `(N,)`.

        Minus infinity where there is no other. Without `pairs` a block of them is made at a time.
        """
        num_rows = self.units.shape[0]
        excluded = torch.ones(num_rows, dtype=torch.bool, device=self.finite.device)
        excluded[: self.num_tokens] = ~self.finite
        index = torch.arange(num_rows, device=excluded.device)
        nearest = []
        for start in range(0, num_rows, _BLOCK):
            block = slice(start, start + _BLOCK)
            cosines = snap(self.units[block] @ self.units.T) if pairs is None else pairs[block]
            others = cosines.masked_fill(
                excluded | (index[block].unsqueeze(-1) == index), -torch.inf
            )
            nearest.append(others.amax(dim=-1))
        return torch.cat(nearest)[: self.num_tokens]

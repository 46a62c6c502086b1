"""The geometry of Cen-Prune (Wen et al., 2026): what tells tokens apart once their mean is gone.

Projected tokens lie in a narrow cone, so their cosines are all high. With the mean taken off, the
cosines use their whole range; how unlike the others a token was before is kept as its weight.
"""

import torch
from torch import Tensor

from msdg_vllm.core.signals import row_norms, unit
from msdg_vllm.core.tiles import TILE, fill_up, round_up
from msdg_vllm.methods.cdpruner import relative
from msdg_vllm.methods.similarity import UnitTokens

# A token nearer to the mean than this, beside the longest token, has no direction of its own.
_AT_THE_MEAN = 2.0**-20


def centred(visual: Tensor, finite: Tensor) -> UnitTokens:
    """Return the tokens `(N, D)` less the mean of the finite ones, at unit length in float64.

    In float64 equal float32 tokens leave exactly nothing behind when they are all there is.
    """
    num_tokens = len(visual)
    tokens = visual.double().masked_fill(~finite.unsqueeze(-1), 0.0)
    mean = tokens.sum(dim=0) / finite.sum().clamp_min(1)
    longest = row_norms(tokens).amax()
    tokens = fill_up(
        (tokens - mean).masked_fill(~finite.unsqueeze(-1), 0.0), round_up(num_tokens, TILE)
    )
    norms = row_norms(tokens)
    units = unit(tokens, norms).masked_fill_((norms <= _AT_THE_MEAN * longest).unsqueeze(-1), 0.0)
    return UnitTokens(units, finite)


def distinctiveness(tokens: UnitTokens) -> Tensor:
    """Return how unlike the others each token is, scaled to (0, 1] over the finite ones, `(N,)`.

    Minus the mean cosine to all finite tokens; that each is one of them changes nothing after
    scaling.
    """
    mean = tokens.units.sum(dim=0) / tokens.finite.sum().clamp_min(1)
    return relative(-torch.mv(tokens.units, mean)[: tokens.num_tokens], tokens.finite)

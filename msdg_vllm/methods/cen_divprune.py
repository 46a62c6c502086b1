"""Cen-Prune in DivPrune (Wen et al., 2026): far apart once centred, and unlike the rest before."""

import torch
from torch import Tensor

from msdg_vllm.core import kernels
from msdg_vllm.methods.centred import centred, distinctiveness
from msdg_vllm.methods.divprune import farthest_by_kernel
from msdg_vllm.methods.image import Image, Selection, top_tokens
from msdg_vllm.methods.method import Method
from msdg_vllm.methods.needs import Encoder, Needs
from msdg_vllm.methods.similarity import UnitTokens


class CenDivPrune(Method):
    """DivPrune's greedy choice by centred cosine distance times raw distinctiveness.

    The first is the token with the largest product of its weight and the distance to its nearest
    neighbour, each next one that with the largest product of its weight and the distance to the
    nearest of those chosen. Waits for no device; B steps follow one another, in one launch where
    kernels run.
    """

    def needs(self, encoder: Encoder) -> Needs:
        return Needs(visual=True)

    def select(self, image: Image, budget: int) -> Selection:
        raw = UnitTokens.of(image.visual)
        weight = distinctiveness(raw)
        tokens = centred(image.visual, raw.finite)
        chosen = _farthest(tokens, weight.double(), min(budget, tokens.num_tokens))
        scores = torch.where(tokens.finite, weight, torch.nan)
        return Selection(
            top_tokens(scores, budget, first=chosen & tokens.finite),
            scores=weight,
        )


def _farthest(tokens: UnitTokens, weight: Tensor, num_steps: int) -> Tensor:
    """The tokens of the largest weighted distances, one after the other, as a mask `(N,)`."""
    pairs = tokens.pairs()
    nearest = tokens.nearest_cosine(pairs)
    # Alone among tokens that are not finite, one is as far as can be from all others.
    gain = weight * (1.0 - nearest.clamp_min(-1.0))
    by_kernel = kernels.run(
        tokens.units.device,
        lambda: farthest_by_kernel(
            tokens, pairs, -gain.masked_fill(~tokens.finite, -torch.inf), num_steps, weight
        ),
    )
    if by_kernel is not None:
        return by_kernel
    chosen = torch.zeros_like(tokens.finite)
    to_chosen = torch.full_like(gain, -1.0)
    for _ in range(num_steps):
        # argmax returns the first of equal values.
        index = gain.masked_fill(chosen | ~tokens.finite, -1.0).argmax(keepdim=True)
        chosen = chosen.scatter(0, index, True)
        to_chosen = to_chosen.maximum(tokens.cosines_to_token(index, pairs))
        gain = weight * (1.0 - to_chosen)
    return chosen

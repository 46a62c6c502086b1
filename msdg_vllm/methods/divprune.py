"""DivPrune (Alvar et al., 2025): the tokens that lie farthest apart, max-min diversity."""

import torch
from torch import Tensor

from msdg_vllm.core import kernels
from msdg_vllm.methods.image import Image, Selection, top_tokens
from msdg_vllm.methods.method import Method
from msdg_vllm.methods.needs import Encoder, Needs
from msdg_vllm.methods.similarity import UnitTokens


class DivPrune(Method):
    """A greedy max-min choice by the cosine distance of projected tokens.

    The first is the token farthest from its nearest neighbour, each next one the token farthest
    from the nearest of those chosen. A chosen token never comes up again, nor does one that is not
    finite while others are left. Waits for no device; B steps follow one another, in one launch
    where kernels run.
    """

    def needs(self, encoder: Encoder) -> Needs:
        return Needs(visual=True)

    def select(self, image: Image, budget: int) -> Selection:
        tokens = UnitTokens.of(image.visual)
        chosen = _farthest(tokens, min(budget, tokens.num_tokens))
        # With no finite token left the smallest is any token.
        scores = torch.where(tokens.finite, 0.0, torch.nan)
        return Selection(top_tokens(scores, budget, first=chosen & tokens.finite))


def _farthest(tokens: UnitTokens, num_steps: int) -> Tensor:
    """The tokens that lie farthest apart, one after the other, as a mask `(N,)`."""
    # The largest distance is the smallest cosine; argmin returns the first of equal values.
    # What is chosen or not finite is infinitely near.
    pairs = tokens.pairs()
    to_neighbour = tokens.nearest_cosine(pairs).masked_fill(~tokens.finite, torch.inf)
    by_kernel = kernels.run(
        tokens.units.device, lambda: farthest_by_kernel(tokens, pairs, to_neighbour, num_steps)
    )
    if by_kernel is not None:
        return by_kernel
    chosen = torch.zeros_like(tokens.finite)
    to_chosen = torch.full_like(to_neighbour, -torch.inf).masked_fill_(~tokens.finite, torch.inf)
    index = to_neighbour.argmin(keepdim=True)
    for _ in range(num_steps):
        chosen = chosen.scatter(0, index, True)
        to_chosen = to_chosen.maximum(tokens.cosines_to_token(index, pairs))
        index = to_chosen.masked_fill(chosen, torch.inf).argmin(keepdim=True)
    return chosen


def farthest_by_kernel(
    tokens: UnitTokens,
    pairs: Tensor | None,
    first: Tensor,
    num_steps: int,
    weight: Tensor | None = None,
) -> Tensor:
    """The same on a device: the token with the lowest of `first` comes first."""
    from msdg_vllm.core.kernels.greedy import farthest_tokens  # loads Triton

    return farthest_tokens(tokens.units, pairs, first, tokens.finite, num_steps, weight)

"""CDPruner (Zhang et al., 2025): diversity conditioned on the question, by greedy MAP of a DPP.

The original takes relevance from CLIP's text tower. Here it comes from the language model's
embeddings of the question, as for MSDG-Prune, so the sign is plus and no weights are added.
"""

import torch
from torch import Tensor

from msdg_vllm.core import kernels
from msdg_vllm.core.signals import row_norms, unit
from msdg_vllm.core.tiles import NARROW_TILE, TILE, fill_up, round_up
from msdg_vllm.methods.image import Image, Selection, top_tokens
from msdg_vllm.methods.method import Method
from msdg_vllm.methods.needs import Encoder, Needs
from msdg_vllm.methods.similarity import UnitTokens

_RELEVANCE_EPSILON = 1e-6
# What float32 tokens may get wrong: a smaller spread of relevance is none, and a token of which
# less is left than this lies in the span of those chosen (less than 0.2 degrees away from it).
_SPREAD_RESOLUTION = 2.0**-20
_RESIDUAL_RESOLUTION = 2.0**-17


class CDPruner(Method):
    """Greedy MAP of the kernel L = diag(r) S diag(r), cosines S, relevance r in (0, 1].

    When no token is left that adds to the determinant, the rest of the budget goes to the most
    relevant ones. Without a question all are equally relevant. Waits for no device; B steps
    follow one another, in one launch where kernels run.
    """

    def needs(self, encoder: Encoder) -> Needs:
        return Needs(visual=True, query=True)

    def select(self, image: Image, budget: int) -> Selection:
        tokens = UnitTokens.of(image.visual)
        relevance = relative_relevance(tokens, image.query)
        scores = torch.where(tokens.finite, relevance, torch.nan)
        chosen = greedy_map(_exact(image.visual, tokens.finite), relevance, budget)
        return Selection(top_tokens(scores, budget, first=chosen), scores=relevance)


def _exact(visual: Tensor, finite: Tensor) -> UnitTokens:
    """The tokens at unit length in float64.

    When the budget comes near the width of the tokens, what the chosen ones leave of the others
    is so little that the rounding of float32 would decide between them.
    """
    tokens = fill_up(visual.double(), round_up(len(visual), TILE))
    norms = row_norms(tokens)
    units = unit(tokens, norms)
    units[: len(finite)].masked_fill_(~finite.unsqueeze(-1), 0.0)
    return UnitTokens(units, finite)


def greedy_map(tokens: UnitTokens, relevance: Tensor, budget: int) -> Tensor:
    """The tokens that add most to the determinant, one after the other, as a mask `(N,)`."""
    num_tokens, num_steps = tokens.num_tokens, min(budget, tokens.num_tokens)
    # The factorisation runs on S instead of L: a Cholesky row of L is r times one of S, and the
    # gain of a token is r^2 times what the chosen ones leave of it. So a small r costs no digits.
    pairs = tokens.pairs()
    relevance = relevance.double()
    by_kernel = kernels.run(
        tokens.units.device, lambda: _by_kernel(tokens, pairs, relevance, num_steps)
    )
    if by_kernel is not None:
        return by_kernel
    rows = tokens.units.new_zeros(tokens.units.shape[0], round_up(num_steps, TILE))  # (N', B')
    residual = torch.ones_like(relevance)
    chosen = torch.zeros_like(tokens.finite)
    for step in range(num_steps):
        is_open = tokens.finite & ~chosen & (residual > _RESIDUAL_RESOLUTION)
        gain = torch.where(is_open, relevance.square() * residual, -1.0)
        index = gain.argmax(keepdim=True)
        # Without an open token the largest is any token: nothing may change then.
        adds = is_open.gather(0, index)
        done = rows[:, : round_up(step, TILE)]
        explained = torch.mv(done, done.index_select(0, index).squeeze(0))[:num_tokens]
        pivot = residual.gather(0, index).clamp_min(_RESIDUAL_RESOLUTION).sqrt()
        row = torch.where(adds, (tokens.cosines_to_token(index, pairs) - explained) / pivot, 0.0)
        rows[:num_tokens, step] = row
        residual = residual - row.square()
        chosen = chosen | torch.zeros_like(chosen).scatter(0, index, adds)
    return chosen


def _by_kernel(
    tokens: UnitTokens, pairs: Tensor | None, relevance: Tensor, num_steps: int
) -> Tensor:
    from msdg_vllm.core.kernels.greedy import spanning_tokens  # loads Triton

    return spanning_tokens(
        tokens.units, pairs, relevance, tokens.finite, num_steps, _RESIDUAL_RESOLUTION
    )


def relative_relevance(tokens: UnitTokens, query: Tensor | None) -> Tensor:
    """r: the mean cosine to the query's tokens, scaled to (0, 1] over the finite tokens, `(N,)`."""
    if query is None or not len(query):
        return torch.ones_like(tokens.finite, dtype=torch.float32)
    num_query = len(query)
    query = fill_up(query.float(), round_up(num_query, NARROW_TILE))
    norms = row_norms(query)
    counts = norms.isfinite() & (torch.arange(len(query), device=query.device) < num_query)
    directions = unit(query, norms).masked_fill_(~counts.unsqueeze(-1), 0.0)
    # The mean of the cosines is the product with the mean of the directions.
    mean = directions.sum(dim=0) / counts.sum().clamp_min(1)
    cosines = torch.mv(tokens.units, mean)[: tokens.num_tokens]
    return relative(cosines, tokens.finite)


def relative(values: Tensor, finite: Tensor) -> Tensor:
    """Scale values `(N,)` to (0, 1] over the finite tokens; all ones where they do not vary."""
    lowest = values.masked_fill(~finite, torch.inf).amin()
    spread = values.masked_fill(~finite, -torch.inf).amax() - lowest
    scaled = (values - lowest + _RELEVANCE_EPSILON) / spread
    return torch.where(spread > _SPREAD_RESOLUTION, scaled, 1.0)

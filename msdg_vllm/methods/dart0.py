"""dart0: pivot diversity on the projected tokens, an approximation of DART (Wen et al., 2025).

DART works inside the language model: pivots by the norm of keys of an early layer, distances
between hidden states. Before the language model there are neither; both come from the embeddings.
"""

import torch
from torch import Tensor

from msdg_vllm.core.tiles import fill_up
from msdg_vllm.methods.image import Image, Selection, top_tokens
from msdg_vllm.methods.method import Method
from msdg_vllm.methods.needs import Encoder, Needs
from msdg_vllm.methods.similarity import UnitTokens

_IMAGE_PIVOTS = 4
_TEXT_PIVOTS = 4


class Dart0(Method):
    """A few pivots, and the tokens least like each of them.

    Pivots are the four image tokens and the four query tokens with the largest L1 norm. The image
    pivots are kept. Then each pivot in turn, image before text and larger before smaller, takes
    its share of the rest of the budget: the tokens not yet taken with the lowest cosine to it.
    Shares are equal; the first pivots take one more where it does not come out even. Waits for
    no device.
    """

    def needs(self, encoder: Encoder) -> Needs:
        return Needs(visual=True, query=True)

    def select(self, image: Image, budget: int) -> Selection:
        tokens = UnitTokens.of(image.visual)
        num_pivots = min(_IMAGE_PIVOTS, budget, tokens.num_tokens)
        pivots = _by_size(image.visual, tokens.finite)[:num_pivots]
        taken = torch.zeros_like(tokens.finite).scatter(0, pivots, True)
        cosines = [tokens.cosines_to_token(pivot) for pivot in pivots.split(1)]
        if image.query is not None and len(image.query):
            text = UnitTokens.of(image.query)
            spoken = _by_size(image.query, text.finite)[:_TEXT_PIVOTS]
            cosines += [tokens.cosines_to(row) for row in text.units.index_select(0, spoken)]
        share, num_larger = divmod(budget - num_pivots, len(cosines))
        for number, to_pivot in enumerate(cosines):
            quota = share + (number < num_larger)
            far = to_pivot.masked_fill(taken | ~tokens.finite, torch.inf).argsort(stable=True)
            taken = taken.scatter(0, far[:quota], True)
        # Where finite tokens ran out a pivot took others.
        scores = torch.where(tokens.finite, 0.0, torch.nan)
        return Selection(top_tokens(scores, budget, first=taken & tokens.finite))


def _by_size(vectors: Tensor, finite: Tensor) -> Tensor:
    """The places of the rows by descending L1 norm, ties by order; those not finite last."""
    vectors = fill_up(vectors.float(), len(vectors))
    sizes = torch.linalg.vector_norm(vectors, ord=1, dim=-1)
    return torch.where(finite, sizes, -1.0).argsort(descending=True, stable=True)

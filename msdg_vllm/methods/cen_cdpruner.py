"""Cen-Prune in CDPruner (Wen et al., 2026): a DPP of centred cosines, weighted by two scores."""

import torch

from msdg_vllm.methods.cdpruner import greedy_map, relative_relevance
from msdg_vllm.methods.centred import centred, distinctiveness
from msdg_vllm.methods.image import Image, Selection, top_tokens
from msdg_vllm.methods.method import Method
from msdg_vllm.methods.needs import Encoder, Needs
from msdg_vllm.methods.similarity import UnitTokens


class CenCDPruner(Method):
    """Greedy MAP of L = diag(w) S diag(w), centred cosines S, w = distinctiveness x relevance.

    When no token is left that adds to the determinant, the rest of the budget goes by weight.
    Without a question all are equally relevant. Waits for no device; B steps follow one another,
    in one launch where kernels run.
    """

    def needs(self, encoder: Encoder) -> Needs:
        return Needs(visual=True, query=True)

    def select(self, image: Image, budget: int) -> Selection:
        raw = UnitTokens.of(image.visual)
        weight = distinctiveness(raw) * relative_relevance(raw, image.query)
        chosen = greedy_map(centred(image.visual, raw.finite), weight, budget)
        scores = torch.where(raw.finite, weight, torch.nan)
        return Selection(top_tokens(scores, budget, first=chosen), scores=weight)

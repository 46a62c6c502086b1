"""HiPrune (Liu et al., 2025): anchors of a middle layer, what surrounds them, and registers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from msdg_vllm.methods.image import Image, Selection, top_tokens
from msdg_vllm.methods.method import Method
from msdg_vllm.methods.needs import Encoder, Needs

# The original reads layer 8, counted from 0, of the 23 that LLaVA runs of CLIP-ViT-L, and layer
# 15 of the 32 of Qwen2.5-VL: there, the layer with global attention nearest to the same depth.
_MIDDLE_DEPTH = 8 / 22
# Share of the budget that goes to anchors and their four neighbours.
_ANCHOR_SHARE = 0.1
_TOKENS_PER_ANCHOR = 5


class HiPrune(Method):
    """Tokens that receive most attention, in a middle layer and in the last one.

    Anchors lead in the middle layer, where objects show; buffers are their neighbours in the
    grid; registers lead in the last layer and fill the budget. Waits for no device.
    """

    def needs(self, encoder: Encoder) -> Needs:
        return Needs(received_attention=_layers(encoder))

    def select(self, image: Image, budget: int) -> Selection:
        middle, deep = (
            image.per_token(image.signals.received_attention[layer])
            for layer in _layers(image.encoder)
        )
        finite = middle.isfinite() & deep.isfinite()
        hierarchy = torch.zeros_like(finite)
        if num_anchors := round(_ANCHOR_SHARE * budget / _TOKENS_PER_ANCHOR):
            anchors = top_tokens(torch.where(finite, middle, torch.nan), num_anchors)
            around = _neighbourhoods(image.grids, middle.device).index_select(0, anchors)
            hierarchy = hierarchy.scatter(0, around.flatten(), True) & finite
        return Selection(top_tokens(deep, budget, first=hierarchy), scores=deep)


def _layers(encoder: Encoder) -> tuple[int, int]:
    """The middle and the deep layer."""
    return encoder.global_layer_near(_MIDDLE_DEPTH), encoder.global_layer_near(1.0)


def _neighbourhoods(grids: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Each token with those beside, above and below it, or itself at an edge, `(N, 5)`."""
    tables = []
    start = 0
    for height, width in grids:
        own = torch.arange(start, start + height * width, device=device).view(height, width)
        left = torch.cat([own[:, :1], own[:, :-1]], dim=1)
        right = torch.cat([own[:, 1:], own[:, -1:]], dim=1)
        above = torch.cat([own[:1], own[:-1]])
        below = torch.cat([own[1:], own[-1:]])
        tables.append(torch.stack([own, left, right, above, below], dim=-1).flatten(0, 1))
        start += height * width
    return torch.cat(tables)

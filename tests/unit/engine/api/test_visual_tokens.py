"""Visual tokens of a rendered prompt."""

from __future__ import annotations

import torch
from vllm.multimodal.inputs import PlaceholderRange

from msdg_vllm.engine.api.processor import SPECS
from msdg_vllm.engine.api.visual_tokens import VisualTokens
from msdg_vllm.engine.spec import UNPRUNED, PruningSpec


def test_text_within_an_item_is_not_counted() -> None:
    is_embed = torch.tensor([False, True, True, False])
    placeholders = [
        PlaceholderRange(offset=0, length=60),  # 42 tokens of text, which the model embeds
        PlaceholderRange(offset=60, length=4, is_embed=is_embed),
    ]
    pruned = PruningSpec(budget=18, num_tokens=72)
    counted = VisualTokens.of_input(
        {SPECS: {"video": [pruned, UNPRUNED]}, "mm_placeholders": {"video": placeholders}}
    )
    assert (counted.kept, counted.total) == (18 + 2, 72 + 2)
    assert (counted.items, counted.pruned_items) == (2, 1)

"""Placeholders of a pruned item: as many as are kept of it."""

from __future__ import annotations

from dataclasses import replace

import torch
from vllm.multimodal.processing import PromptUpdateDetails


def shortened(
    content: PromptUpdateDetails, budget: int, *, carries_text: bool = False
) -> PromptUpdateDetails:
    """What the stock processor puts into the prompt for an item, cut to its budget.

    Args:
        content: Tokens of the whole item, and which of them are the encoder's.
        budget: How many of those stay; 0 leaves all.
        carries_text: Whether the model embeds the text between an item's tokens with them.
    """
    if not budget:
        return content
    if content.is_embed is None:
        return replace(content, full=content.full[:1] * budget)
    is_embed = content.is_embed(content.full)
    stays = ~is_embed | (is_embed.cumsum(0) <= budget)
    token_ids = torch.tensor(content.full)[stays].tolist()
    # Without a mask every token of the item gets its embedding from the model.
    return replace(content, full=token_ids, is_embed=None if carries_text else content.is_embed)

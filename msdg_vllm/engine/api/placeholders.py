"""Placeholders of a pruned item: as many as are kept of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.multimodal.processing import PromptUpdateDetails

from msdg_vllm.engine.spec import PruningSpec


@dataclass(frozen=True, slots=True)
class ShortenedReplacement:
    """A prompt replacement of the stock processor, cut to each item's budget.

    Attributes:
        replacement: The stock one: tokens, or a function that gives those of an item.
        specs: What each item asks for.
        carries_text: Whether the model embeds the text between an item's tokens with them.
    """

    replacement: Any
    specs: Sequence[PruningSpec]
    carries_text: bool = False

    def __call__(self, item_idx: int) -> Any:
        content = self.replacement(item_idx) if callable(self.replacement) else self.replacement
        budget = self.specs[item_idx].budget
        if not budget:
            return content
        if not isinstance(content, PromptUpdateDetails):
            return content[:1] * budget
        assert content.is_embed is not None
        is_embed = content.is_embed(content.full)
        stays = ~is_embed | (is_embed.cumsum(0) <= budget)
        token_ids = torch.tensor(content.full)[stays].tolist()
        # Without a mask every token of the item gets its embedding from the model.
        return replace(
            content, full=token_ids, is_embed=None if self.carries_text else content.is_embed
        )

"""How many tokens an item may keep, within what the operator allows, and the prompt then has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from vllm.multimodal.processing import PromptUpdateDetails

from msdg_vllm.core.errors import RequestError
from msdg_vllm.request import AUTO, MAX_VISUAL_TOKENS, RETENTION, ItemTurn, PruningRequest
from msdg_vllm.settings import Settings

BudgetAt = Callable[[float], int]
"""Tokens that are kept of something at a retention; all of them at 1.0."""


@dataclass(frozen=True, slots=True)
class OpenItem:
    """An item whose retention the server decides: who it is without its budget, and its tokens.

    `most` is how many of them it may keep at any retention; None for no such number.
    """

    identity: str
    num_tokens: int
    most: int | None = None


class Chooser(Protocol):
    """Whoever decides about open items; the server has one when it holds a target."""

    def choose(
        self, items: Sequence[OpenItem], fixed_tokens: int, encoder_tokens: int
    ) -> tuple[Sequence[float], Any]:
        """Return a retention for each item, and what stands for the request while it waits."""


@dataclass(frozen=True, slots=True)
class Budgeting:
    """The rules of a server."""

    settings: Settings

    def retention_of(self, item: ItemTurn, request: PruningRequest) -> float | None:
        """The fraction that was asked for of an item; None leaves it to the server.

        What is said first counts: of the image, of the request, by its detail, by the name served.
        """
        said = (
            item.retention,
            request.retention,
            self.settings.detail_low_retention if item.is_low_detail else None,
            request.alias_retention,
        )
        asked = next((one for one in said if one is not None), None)
        floor = self.settings.min_retention
        if asked is None or asked == AUTO:
            return None
        if isinstance(asked, float | int) and floor is not None and asked < floor:
            raise RequestError(
                f"retention {asked} is below what this server allows; send {floor} or more",
                parameter=RETENTION,
            )
        return float(asked)

    def most(self, item: ItemTurn, request: PruningRequest) -> int | None:
        """The most tokens that an item may keep, whatever its size; None for no such number."""
        own = item.max_visual_tokens or request.max_visual_tokens
        return own or self.settings.max_visual_tokens

    def budget(
        self, retention: float, item: ItemTurn, request: PruningRequest, budget_at: BudgetAt
    ) -> int:
        """Tokens to keep of an item: its share, and no more than the count that was asked for."""
        most = self.most(item, request)
        budget = budget_at(retention)
        if most is None or most >= budget:
            return budget
        floor = self.settings.min_retention
        # The operator's own count is no wish of a client.
        is_asked = item.max_visual_tokens or request.max_visual_tokens
        if is_asked and floor is not None and most < (least := budget_at(floor)):
            raise RequestError(
                f"{MAX_VISUAL_TOKENS} {most} keeps less of an image than the fraction {floor} that "
                f"this server allows at least; send {least} or more for this image",
                parameter=MAX_VISUAL_TOKENS,
            )
        return most

    def ceiling(self, kept: int, kept_at: BudgetAt) -> float:
        """The most that the server may give the items it decides about, beside `kept` tokens.

        1.0 where nothing limits a request, or where no retention would fit.
        """
        limit = self.settings.max_visual_tokens_per_request
        if limit is None or kept + kept_at(1.0) <= limit:
            return 1.0
        fitting = largest_retention(limit - kept, kept_at)
        return 1.0 if fitting is None else max(fitting, self.settings.min_retention or 0.0)

    def check_total(self, kept: int, kept_at: BudgetAt) -> None:
        """Raise `RequestError` for a request that keeps more than one may."""
        limit = self.settings.max_visual_tokens_per_request
        if limit is None or kept <= limit:
            return
        fitting = largest_retention(limit, kept_at)
        advice = "send fewer images" if fitting is None else f"it would fit at retention {fitting}"
        raise RequestError(
            f"this request keeps {kept} visual tokens, and this server allows {limit} per request; "
            f"{advice}",
            parameter=RETENTION,
        )


def largest_retention(limit: int, kept_at: BudgetAt) -> float | None:
    """Return the largest retention of three decimals at which `limit` is kept; None for none."""
    low, high = 0, 1000  # what fits at `low` thousandths; nothing is known beyond `high`
    while low < high:
        middle = (low + high + 1) // 2
        if kept_at(middle / 1000) <= limit:
            low = middle
        else:
            high = middle - 1
    return low / 1000 if low else None


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

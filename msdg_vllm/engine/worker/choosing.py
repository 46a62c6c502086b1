"""From a batch of encoded images and what each asks for to the tokens that stay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from msdg_vllm.methods import Choice, ImageBatch, method_named


@dataclass(frozen=True, slots=True)
class Wish:
    """What one row of a batch asks for.

    Attributes:
        method: Which method decides.
        budget: Tokens to keep; 0 for a row without real tokens.
        query_ids: Token ids of the query; rows that share them share one call.
        query: Their embeddings, `(Q, D)`.
    """

    method: str
    budget: int
    query_ids: tuple[int, ...]
    query: torch.Tensor


def choose_tokens(batch: ImageBatch, wishes: Sequence[Wish]) -> list[Choice]:
    """Choose the tokens of every row, each by its own method.

    One analysis per method, then one call per query and budget. The batch is let go before the
    calls, and the encoder's states with it unless a method still needs them.
    """
    rows_of: defaultdict[str, list[int]] = defaultdict(list)
    for row, wish in enumerate(wishes):
        if wish.budget:
            rows_of[wish.method].append(row)
    nothing = Choice(torch.empty(0, dtype=torch.int64, device=batch.visual.device))
    analyses = {
        name: method_named(name).analyze(batch.take(rows)) for name, rows in rows_of.items()
    }
    del batch
    choices: dict[int, Choice] = {}
    for name, rows in rows_of.items():
        calls: defaultdict[tuple[tuple[int, ...], int], list[int]] = defaultdict(list)
        for place, row in enumerate(rows):
            calls[wishes[row].query_ids, wishes[row].budget].append(place)
        for (query_ids, budget), places in calls.items():
            query = wishes[rows[places[0]]].query if query_ids else None
            chosen = analyses[name].choose(places, query, budget)
            choices.update(zip((rows[place] for place in places), chosen, strict=True))
    return [choices.get(row, nothing) for row in range(len(wishes))]

"""The order an image carries from the API process to the worker: how many tokens, which query."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from msdg_vllm.request import METHODS, SCOPES

_WORD = 2**63  # what an int64 holds without its sign


@dataclass(frozen=True, slots=True)
class PruningSpec:
    """What the worker does to one image or video; equal specs mean equal kept tokens.

    Attributes:
        budget: Tokens to keep, at most `num_tokens`; 0 leaves the item on vLLM's own path.
        num_tokens: Tokens the encoder gives before pruning.
        query_ids: Distinct token ids of the query, ascending: relevance is a maximum over
            them, so order and repetition carry nothing. Empty: every token is as relevant.
        method: Which selector decides.
        scope: Whether a tiled image spends its budget per tile or as a whole.
        seed: Identifies the content of the item, if the method draws by it; 0 otherwise.
        explanation: Key under which the worker keeps its decision; 0 keeps nothing.
        item: Which item of its request this is, if it has an explanation; 0 otherwise.
        content: Identifies, in 126 bits, what the encoder makes of the item, and for whom: the
            items of another `cache_salt` have others. 0: nothing of it may be kept.
        scaled_from: Tokens that the item has at its own size, if it was scaled down before the
            encoder; 0 otherwise.
    """

    budget: int
    num_tokens: int
    query_ids: tuple[int, ...] = ()
    method: str = METHODS[0]
    scope: str = SCOPES[0]
    seed: int = 0
    explanation: int = 0
    item: int = 0
    content: int = 0
    scaled_from: int = 0

    def identity(self) -> str:
        """Text that two specs of one image share exactly when they may share a cache entry."""
        return repr(replace(self, content=0))

    def selection_identity(self) -> str:
        """Text that two specs share exactly when the same tokens are kept of the same image."""
        return repr(replace(self, explanation=0, item=0))

    def to_tensor(self) -> torch.Tensor:
        """Pack into one int64 row, the form that crosses processes."""
        header = [
            self.budget,
            self.num_tokens,
            METHODS.index(self.method),
            SCOPES.index(self.scope),
            self.seed,
            self.explanation,
            self.item,
            *divmod(self.content, _WORD),
            self.scaled_from,
        ]
        return torch.tensor([*header, *self.query_ids], dtype=torch.int64)

    @staticmethod
    def counts_in(row: torch.Tensor) -> tuple[int, int]:
        """Read only the budget and the number of tokens of a row: what a scheduler needs."""
        budget, num_tokens = row[:2].tolist()
        return budget, num_tokens

    @classmethod
    def from_tensor(cls, row: torch.Tensor) -> PruningSpec:
        """Unpack a row that stayed on the host: reading it waits for no device."""
        budget, num_tokens, method, scope, seed, explanation, item, *rest = row.tolist()
        high, low, scaled_from, *query_ids = rest
        return cls(
            budget=budget,
            num_tokens=num_tokens,
            query_ids=tuple(query_ids),
            method=METHODS[method],
            scope=SCOPES[scope],
            seed=seed,
            explanation=explanation,
            item=item,
            content=high * _WORD + low,
            scaled_from=scaled_from,
        )


UNPRUNED = PruningSpec(budget=0, num_tokens=0)


def field_name(modality: str) -> str:
    """Name of the field with the specs; every item has it, so that all can share a batch."""
    return f"msdg_{modality}_spec"


def row_of(feature: Any) -> torch.Tensor | None:
    """The row of an item in vLLM's queue; None for an item of a model that is not ours."""
    element = None if feature.data is None else feature.data.get(field_name(feature.modality))
    row = None if element is None else element.data
    return row if isinstance(row, torch.Tensor) else None


def is_field_name(name: str) -> bool:
    """Whether a field has specs, of whatever modality."""
    return name.startswith("msdg_") and name.endswith("_spec")

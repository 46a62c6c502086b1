"""The call that every method stands behind."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from msdg_vllm.methods.image import Choice, Image, ImageBatch
from msdg_vllm.methods.needs import Encoder, Needs


class Analysis(Protocol):
    """What a method made of a batch before it is asked about questions and budgets."""

    def choose(self, rows: Sequence[int], query: Tensor | None, budget: int) -> list[Choice]:
        """Choose the tokens of some rows of the batch for one query and one budget.

        Indices, scores, groups and sinks count the tokens of the row, padding included.
        """
        ...


class Method(ABC):
    """Chooses which tokens of an image the language model reads.

    Every method keeps this contract:

    - exactly `budget` distinct tokens, 1 <= budget <= N, in their original order, whatever the
      values are: flat, repeated, zero or not finite;
    - the same bits in give the same tokens out, in every batch: no random numbers, ties by the
      original order, arithmetic in float32;
    - on the device of its inputs, without waiting for it unless its docstring says where.

    Instances hold no state; one serves all requests.
    """

    @abstractmethod
    def needs(self, encoder: Encoder) -> Needs:
        """Say what of this encoder the method reads."""

    @abstractmethod
    def select(self, image: Image, budget: int) -> Choice:
        """Choose the tokens of one image."""

    def analyze(self, batch: ImageBatch) -> Analysis:
        """Do for all rows what no question changes; by default that is nothing.

        Row by row is not only simpler: a product launched on the same shape gives the same bits
        whatever else travels in the batch.
        """
        return _RowByRow(self, batch)


class _RowByRow:
    """Asks the method about one row after the other."""

    def __init__(self, method: Method, batch: ImageBatch) -> None:
        self._method = method
        self._batch = batch

    @torch.no_grad()
    def choose(self, rows: Sequence[int], query: Tensor | None, budget: int) -> list[Choice]:
        return [
            _with_padding(
                self._method.select(self._batch.image(row, query), budget),
                self._batch.places[row],
                self._batch.visual.shape[1],
            )
            for row in rows
        ]


def _with_padding(choice: Choice, places: Tensor | None, num_tokens: int) -> Choice:
    """Count the tokens of a choice as the row does, whose padding the method did not see."""
    if places is None:
        return choice

    def spread(values: Tensor | None, padding: float) -> Tensor | None:
        if values is None:
            return None
        return values.new_full((num_tokens,), padding).scatter(0, places, values)

    return Choice(
        indices=places[choice.indices],
        embeddings=choice.embeddings,
        scores=spread(choice.scores, 0.0),
        groups=spread(choice.groups, -1),
        sinks=spread(choice.sinks, False),
    )

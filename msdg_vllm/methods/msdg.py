"""MSDG-Prune, the method of this package, behind the call that it shares with the others."""

from collections.abc import Sequence

import torch
from torch import Tensor

from msdg_vllm.core import ImageSignals, analyze_image, score_tokens, take_tokens
from msdg_vllm.methods.image import Choice, Image, ImageBatch
from msdg_vllm.methods.method import Analysis, Method
from msdg_vllm.methods.needs import Encoder, Needs


class Msdg(Method):
    """Saliency, groups and sinks from the encoder's states; relevance from the query.

    Waits for no device. The query-free half runs on all rows of a batch at once.
    """

    def needs(self, encoder: Encoder) -> Needs:
        return Needs(states=encoder.profile.layers, query=True)

    def select(self, image: Image, budget: int) -> Choice:
        signals = analyze_image(
            image.signals.states, image.encoder.profile, image.encoder.patches_per_token
        )
        return _choice(signals, image.visual, image.query, budget)

    def analyze(self, batch: ImageBatch) -> Analysis:
        signals = analyze_image(
            batch.signals.states,
            batch.encoder.profile,
            batch.encoder.patches_per_token,
            valid=batch.valid,
        )
        return _Analyzed(signals, batch.visual)


class _Analyzed:
    """Signals of all rows of a batch; holds none of the encoder's states."""

    def __init__(self, signals: ImageSignals, visual: Tensor) -> None:
        self._signals = signals
        self._visual = visual

    def choose(self, rows: Sequence[int], query: Tensor | None, budget: int) -> list[Choice]:
        if len(rows) == 1:
            return [_choice(self._signals[rows[0]], self._visual[rows[0]], query, budget)]

        def taken(tensor: Tensor) -> Tensor:
            if len(rows) == len(tensor):
                return tensor
            # Slices, because an index list would have to be copied to the device first.
            return torch.stack([tensor[row] for row in rows])

        signals, visual = self._signals.map(taken), taken(self._visual)
        scores = score_tokens(signals, visual, query)
        indices = take_tokens(signals, scores, budget)
        return [
            Choice(kept, scores=score, groups=groups, sinks=sinks)
            for kept, score, groups, sinks in zip(
                indices, scores.score, signals.groups, signals.sink_mask, strict=True
            )
        ]


def _choice(signals: ImageSignals, visual: Tensor, query: Tensor | None, budget: int) -> Choice:
    scores = score_tokens(signals, visual, query)
    return Choice(
        indices=take_tokens(signals, scores, budget),
        scores=scores.score,
        groups=signals.groups,
        sinks=signals.sink_mask,
    )

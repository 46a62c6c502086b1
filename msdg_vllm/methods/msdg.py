"""MSDG-Prune, the method of this package, behind the call that it shares with the others."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

from msdg_vllm.core import ImageSignals
from msdg_vllm.core.analysis import analyze_tokens
from msdg_vllm.core.selection import select_images
from msdg_vllm.core.stream import TokenSignals, token_signals
from msdg_vllm.methods.image import Image, Question, Selection
from msdg_vllm.methods.method import Method
from msdg_vllm.methods.needs import Encoder, Needs


@dataclass(frozen=True, slots=True)
class Analyzed:
    """What is left of an image: a few numbers per token, and the tokens; none of its states."""

    signals: ImageSignals
    visual: Tensor


class Msdg(Method):
    """Saliency, groups and sinks from the encoder's states; relevance from the query.

    Waits for no device. The query-free half runs on all images of a size at once, the other on
    images of any size, each with its own question and budget.
    """

    reads_profile = True
    keeps_findings = True

    def needs(self, encoder: Encoder) -> Needs:
        return Needs(token_signals=encoder.measured.layers, query=True)

    def select(self, image: Image, budget: int) -> Selection:
        (selection,) = self.select_all(self.analyze([image]), [Question(budget, image.query)])
        return selection

    def analyze(self, images: Sequence[Image]) -> list[Analyzed]:
        has_padding = any(image.places is not None for image in images)
        signals = analyze_tokens(
            [_token_signals(image) for image in images],
            images[0].encoder.measured,
            valid=torch.stack([image.valid for image in images]) if has_padding else None,
        )
        return [Analyzed(signals[row], image.visual) for row, image in enumerate(images)]

    def findings(self, analysis: Analyzed) -> ImageSignals:
        return analysis.signals

    def resume(self, image: Image, findings: ImageSignals) -> Analyzed:
        return Analyzed(findings, image.visual)

    def select_all(
        self, analyses: Sequence[Analyzed], questions: Sequence[Question]
    ) -> list[Selection]:
        selected = select_images(
            [image.signals for image in analyses],
            [image.visual for image in analyses],
            [question.query for question in questions],
            [question.budget for question in questions],
        )
        return [
            Selection(
                indices,
                scores=scores.score,
                groups=image.signals.groups,
                sinks=image.signals.sink_mask,
            )
            for image, (indices, scores) in zip(analyses, selected, strict=True)
        ]


def _token_signals(image: Image) -> TokenSignals:
    """What an encoder made of an image on its way; or what its states, all at hand, still say."""
    if image.signals.token_signals is not None:
        return image.signals.token_signals
    encoder = image.encoder
    states = {n: image.signals.states[n].unsqueeze(0) for n in encoder.measured.layers}
    signals = token_signals(states, encoder.measured, encoder.patches_per_token)
    return signals.map(itemgetter(0))

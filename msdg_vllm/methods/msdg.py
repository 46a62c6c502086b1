"""MSDG-Prune, the method of this package, behind the call that it shares with the others."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from msdg_vllm.core import ImageSignals, TokenScores, score_tokens, take_tokens
from msdg_vllm.core.analysis import analyze_images
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

    Waits for no device. The query-free half runs on all images of a size at once.
    """

    def needs(self, encoder: Encoder) -> Needs:
        return Needs(states=encoder.profile.layers, query=True)

    def select(self, image: Image, budget: int) -> Selection:
        (selection,) = self.select_all(self.analyze([image]), [Question(budget, image.query)])
        return selection

    def analyze(self, images: Sequence[Image]) -> list[Analyzed]:
        has_padding = any(image.places is not None for image in images)
        signals = analyze_images(
            [image.signals.states for image in images],
            images[0].encoder.profile,
            images[0].encoder.patches_per_token,
            valid=torch.stack([image.valid for image in images]) if has_padding else None,
        )
        return [Analyzed(signals[row], image.visual) for row, image in enumerate(images)]

    def select_all(
        self, analyses: Sequence[Analyzed], questions: Sequence[Question]
    ) -> list[Selection]:
        calls: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for row, (image, question) in enumerate(zip(analyses, questions, strict=True)):
            calls[image.signals.num_tokens, question.budget].append(row)
        selections: dict[int, Selection] = {}
        for (_, budget), rows in calls.items():
            scores = [
                score_tokens(analyses[row].signals, analyses[row].visual, questions[row].query)
                for row in rows
            ]
            signals = ImageSignals.stack([analyses[row].signals for row in rows])
            kept = take_tokens(signals, TokenScores.stack(scores), budget)
            for row, indices, scored in zip(rows, kept, scores, strict=True):
                own = analyses[row].signals
                selections[row] = Selection(
                    indices, scores=scored.score, groups=own.groups, sinks=own.sink_mask
                )
        return [selections[row] for row in range(len(analyses))]

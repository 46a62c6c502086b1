"""The call that every method stands behind."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from msdg_vllm.core.signals import full_precision
from msdg_vllm.methods.image import Image, Mappable, Question, Selection
from msdg_vllm.methods.needs import HIDDEN, Encoder, Needs, unmet_need


class Method(ABC):
    """Selects which tokens of an image the language model reads.

    Every method keeps this contract:

    - exactly `budget` distinct tokens, 1 <= budget <= N, in their original order, whatever the
      values are: flat, repeated, zero or not finite;
    - the same bits in give the same tokens out, in every batch: no random numbers, ties by the
      original order, arithmetic in float32;
    - on the device of its inputs, without waiting for it unless its docstring says where.

    Instances hold no state; one serves all requests.

    Attributes:
        reads_profile: Whether the method reads the encoder's profile; `needs` is then called
            only for an encoder that has one.
        keeps_findings: Whether an analysis can be parted into tokens and `findings`, which are
            worth keeping for the next question.
        max_tokens: The largest item that the method takes, where its memory grows faster than
            the number of tokens; None: any.
    """

    reads_profile: ClassVar[bool] = False
    keeps_findings: ClassVar[bool] = False
    max_tokens: ClassVar[int | None] = None

    def unmet_need(self, encoder: Encoder) -> str | None:
        """Say what an encoder cannot give to the method; None when it can give all."""
        if self.reads_profile and not encoder.shows_states:
            return HIDDEN
        if self.reads_profile and encoder.profile is None:
            return (
                "a profile of the vision encoder, and there is none for this one (make one with "
                "`msdg-vllm calibrate`, and start with it as --profile)"
            )
        return unmet_need(self.needs(encoder), encoder)

    @abstractmethod
    def needs(self, encoder: Encoder) -> Needs:
        """Say what of this encoder the method reads."""

    @abstractmethod
    def select(self, image: Image, budget: int) -> Selection:
        """Select the tokens of one image, all of which are real."""

    def encoder_tokens(self, num_tokens: int, budget: int) -> int:
        """Most tokens that an item may have in the encoder; fewer than it has scale it down.

        Only for encoders of free resolution, and asked before anything is encoded.
        """
        return num_tokens

    def analyze(self, images: Sequence[Image]) -> Sequence[Any]:
        """Do for images of one size what no question changes; by default that is nothing.

        What comes back for an image is all that `select_all` needs of it, for any question.
        """
        return images

    def select_all(self, analyses: Sequence[Any], questions: Sequence[Question]) -> list[Selection]:
        """Select the tokens of analysed images, each for its own question and budget.

        Indices, scores, groups and sinks count all tokens, padding included. One by one is not
        only simpler: a product launched on the same shape gives the same bits whatever else
        travels in the batch.
        """
        return [
            self._select(image, question)
            for image, question in zip(analyses, questions, strict=True)
        ]

    def can_resume(self, encoder: Encoder) -> bool:
        """Whether an image's tokens, and findings if there are any, are all that is needed."""
        return self.keeps_findings or not self.needs(encoder).reads_encoder

    def findings(self, analysis: Any) -> Mappable:
        """What an analysis says beside the tokens."""
        raise NotImplementedError

    def resume(self, image: Image, findings: Any) -> Any:
        """Return the analysis of an image of which only the tokens are left, and the findings."""
        raise NotImplementedError

    @torch.no_grad()
    def _select(self, image: Image, question: Question) -> Selection:
        real = replace(image.without_padding(), query=question.query)
        with full_precision(image.visual.device):
            selection = self.select(real, question.budget)
        if image.places is None:
            return selection
        return selection.spread(image.places, image.num_tokens)

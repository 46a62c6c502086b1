"""Random tokens: the baseline that every method must beat."""

import torch
from torch import Tensor

from msdg_vllm.core.selection import MASK, mix
from msdg_vllm.methods.image import Image, Selection, top_tokens
from msdg_vllm.methods.method import Method
from msdg_vllm.methods.needs import Encoder, Needs


class RandomTokens(Method):
    """Tokens drawn evenly and without replacement, by a hash of the image's content.

    So the same image keeps the same tokens in every batch and on every device, other images keep
    others, and a larger budget keeps what a smaller one does and more. Waits for no device.
    """

    def needs(self, encoder: Encoder) -> Needs:
        return Needs(seed=True)

    def select(self, image: Image, budget: int) -> Selection:
        places = torch.arange(image.num_tokens, device=image.visual.device)
        return Selection(top_tokens(_hashed(places, image.seed), budget))


def _hashed(places: Tensor, seed: int) -> Tensor:
    """Return a number that looks random for each place, `(N,)`: multiply and shift in 31 bits."""
    values = places
    while True:
        values = mix((values + 1) * 0x9E3779B1 + (seed & MASK))
        seed >>= 31
        if not seed:
            # 24 bits, which float32 holds exactly.
            return values >> 7

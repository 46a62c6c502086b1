"""Models pruned by their projected tokens: Hugging Face's rows, the literal references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image

from tests.engine.generation import Generated
from tests.engine.language_oracle import answer
from tests.engine.method_oracle import TowerView, choose


class ProjectedOracle:
    """The same weights as the engine's, none of its code.

    `rows_of` gives the projected tokens of an image, `(N, D)`.
    """

    def __init__(
        self,
        rows_of: Callable[[Image.Image], torch.Tensor],
        tokenizer: Any,
        language_model: Any,
        lm_head: Any,
    ) -> None:
        self.rows_of = rows_of
        self.tokenizer = tokenizer
        self.language_model = language_model
        self.lm_head = lm_head

    @torch.no_grad()
    def keep(self, image: Image.Image, query: str, retention: float, method: str) -> torch.Tensor:
        """The kept rows of an image."""
        rows = self.rows_of(image)
        ids = sorted(set(self.tokenizer.encode(query, add_special_tokens=False)))
        embedded = self.language_model.get_input_embeddings()(torch.tensor(ids))
        view = TowerView({}, rows, embedded, last=0, middle=0, grid_width=1)
        no_profile: Any = None
        budget = max(1, int(len(rows) * retention + 0.5))
        return rows[choose(method, view, no_profile, budget).keep]

    def generate(
        self,
        texts: Sequence[str],
        images: Sequence[Image.Image],
        query: str,
        retention: float,
        method: str = "divprune",
    ) -> Generated:
        """Greedy answer to texts with one image between each two of them."""
        token_ids = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        rows = [self.keep(image, query, retention, method) for image in images]
        return answer(self.language_model, self.lm_head, token_ids, rows)

"""Models pruned by their projected tokens: Hugging Face's rows, the literal references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image

from tests.engine.generation import Generated
from tests.engine.language_oracle import answer
from tests.engine.method_oracle import TowerView, choose, merged_rows
from tests.method_references.drawn import random_reference

READ_ROWS_ALONE = (
    "divprune",
    "prunesid",
    "cdpruner",
    "dart0",
    "cen_divprune",
    "cen_cdpruner",
    "pool",
    "random",
)
"""Methods that read no states."""


class ProjectedOracle:
    """The same weights as the engine's, none of its code.

    `grid_of` gives the projected tokens of an image, `(rows, columns, D)`.
    """

    def __init__(
        self,
        grid_of: Callable[[Image.Image], torch.Tensor],
        tokenizer: Any,
        language_model: Any,
        lm_head: Any,
    ) -> None:
        self.grid_of = torch.no_grad()(grid_of)
        self.tokenizer = tokenizer
        self.language_model = language_model
        self.lm_head = lm_head

    @torch.no_grad()
    def keep(self, image: Image.Image, query: str, retention: float, method: str) -> torch.Tensor:
        """The kept rows of an image."""
        grid = self.grid_of(image)
        rows = grid.flatten(0, 1)
        ids = sorted(set(self.tokenizer.encode(query, add_special_tokens=False)))
        embedded = self.language_model.get_input_embeddings()(torch.tensor(ids))
        budget = max(1, int(len(rows) * retention + 0.5))
        if method == "random":
            return rows[random_reference(image, len(rows), budget)]
        view = TowerView({}, rows, embedded, last=0, middle=0, grid_width=grid.shape[1])
        no_profile: Any = None
        choice = choose(method, view, no_profile, budget)
        return merged_rows(choice, rows) if choice.rows else rows[choice.keep]

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

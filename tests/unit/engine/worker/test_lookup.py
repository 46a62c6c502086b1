"""Queries are looked up once, through the base layer, and not at all when there are none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.lora.layers import VocabParallelEmbeddingWithLoRA

from msdg_vllm.engine.worker.lookup import embed_queries


class LanguageModel(nn.Module):
    """Looks tokens up and reduces them over ranks, as a tensor-parallel language model does."""

    def __init__(self, embed_tokens: nn.Module | None = None) -> None:
        super().__init__()
        table = nn.Embedding(10, 4)
        self.embed_tokens: Any = table if embed_tokens is None else embed_tokens
        self.looked_up: list[list[int]] = []

    def embed_input_ids(self, token_ids: torch.Tensor) -> torch.Tensor:
        self.looked_up.append(token_ids.tolist())
        assert token_ids.numel(), "an all-reduce of an empty tensor"
        embedded: torch.Tensor = self.embed_tokens(token_ids)
        return embedded


def test_equal_queries_are_looked_up_once_and_share_their_rows() -> None:
    model = LanguageModel()
    first, none, second, again = embed_queries(model, [(1, 2, 3), (), (7,), (1, 2, 3)])
    assert model.looked_up == [[1, 2, 3, 7]]
    assert first is again
    assert none is None
    assert first is not None
    assert second is not None
    assert torch.equal(first, model.embed_tokens.weight[1:4])
    assert torch.equal(second, model.embed_tokens.weight[7:8])


def test_nothing_is_looked_up_where_there_is_no_query() -> None:
    model = LanguageModel()
    assert embed_queries(model, [(), ()]) == [None, None]
    assert model.looked_up == []


def test_adapters_of_the_step_have_no_say_in_a_query() -> None:
    base = nn.Embedding(10, 4)
    wrapped: Any = VocabParallelEmbeddingWithLoRA(base)  # type: ignore[arg-type]
    # The step has two tokens, of an adapter whose rows start at 1000 of a table with 10.
    wrapped.punica_wrapper = SimpleNamespace(_embeddings_indices=torch.full((2,), 1000))
    wrapped.lora_a_stacked_2d = torch.zeros(10, 1)
    model = LanguageModel(wrapped)
    (query,) = embed_queries(model, [(1, 2, 3)])
    assert query is not None
    assert torch.equal(query, base.weight[1:4])
    assert "forward" not in vars(wrapped)

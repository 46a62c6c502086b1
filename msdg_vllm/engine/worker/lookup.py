"""Embeddings of queries, from the language model's own table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from vllm.lora.layers import VocabParallelEmbeddingWithLoRA
from vllm.utils.torch_utils import async_tensor_h2d

from msdg_vllm.engine.worker.capture import replaced_forward


def embed_queries(
    language_model: Any, queries: Sequence[tuple[int, ...]]
) -> list[torch.Tensor | None]:
    """Look up the token ids of each query with one call: `(Q, D)` each, None for an empty one.

    Equal queries share a tensor. Nothing is looked up when all are empty: under tensor
    parallelism a look-up ends in an all-reduce, which must not be given an empty tensor.
    """
    distinct = list(dict.fromkeys(filter(None, queries)))
    if not distinct:
        return [None] * len(queries)
    token_ids = async_tensor_h2d(
        [token_id for query in distinct for token_id in query],
        device=next(language_model.parameters()).device,
        dtype=torch.int64,
    )
    with _without_lora(language_model):
        embedded = language_model.embed_input_ids(token_ids)
    by_ids = dict(zip(distinct, embedded.split(list(map(len, distinct))), strict=True))
    return [by_ids.get(query) for query in queries]


@contextmanager
def _without_lora(language_model: nn.Module) -> Iterator[None]:
    """Use the base layers of embeddings.

    An embedding with adapters takes the adapter of each row from the mapping of the whole step,
    in which a query has no rows.
    """
    with ExitStack() as replaced:
        for module in language_model.modules():
            if isinstance(module, VocabParallelEmbeddingWithLoRA):
                replaced.enter_context(replaced_forward(module, module.base_layer.forward))
        yield

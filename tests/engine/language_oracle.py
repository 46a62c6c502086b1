"""A Hugging Face language model that reads text with rows of images in it, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.engine.generation import Generated


@torch.no_grad()
def answer(
    language_model: Any,
    lm_head: Any,
    texts: Sequence[Sequence[int]],
    images: Sequence[torch.Tensor],
    *,
    max_tokens: int = 6,
) -> Generated:
    """Greedy answer to tokenised texts with the embeddings of one image between each two of them.

    Recomputes everything at every step: no cache, no batch.
    """
    embed = language_model.get_input_embeddings()
    prompt_ids: list[int] = []
    rows = []
    for text_ids, image in zip(texts, [*images, None], strict=True):
        prompt_ids += text_ids
        rows.append(embed(torch.tensor(text_ids, dtype=torch.int64)))
        if image is not None:
            prompt_ids += [-1] * len(image)
            rows.append(image)
    embeddings = torch.cat(rows)[None]
    token_ids: list[int] = []
    logprobs: list[dict[int, float]] = []
    for _ in range(max_tokens):
        hidden = language_model(inputs_embeds=embeddings).last_hidden_state
        step = lm_head(hidden[0, -1]).float().log_softmax(-1)
        token_ids.append(int(step.argmax()))
        logprobs.append(dict(enumerate(step.tolist())))
        embeddings = torch.cat([embeddings, embed(torch.tensor([token_ids[-1:]]))], dim=1)
    return Generated(prompt_ids, token_ids, logprobs)

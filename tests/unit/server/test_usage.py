"""Counts on answers: only where they belong, and nothing else changed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from msdg_vllm.engine.api.visual_tokens import VisualTokens
from server.schemas import PruningBatchRequest, PruningChatRequest, wishes_of
from server.usage import report_in_stream

MESSAGES = [{"role": "user", "content": "hi"}]
CHUNKS: list[dict[str, Any]] = [
    {"id": "a", "choices": [{"index": 0, "delta": {"content": '"choices":[] "usage":{ é'}}]},
    {"id": "a", "choices": [{"index": 0, "delta": {"content": "b"}}]},
    {"id": "a", "choices": [], "usage": {"prompt_tokens": 3}},
]


def streamed(request: Any) -> list[Any]:
    closed = []

    async def generate(_: Any) -> AsyncGenerator[str, None]:
        try:
            for chunk in CHUNKS:
                yield f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            closed.append(True)

    async def collect() -> list[str]:
        return [chunk async for chunk in report_in_stream(generate, request)]

    *chunks, done = asyncio.run(collect())
    assert done == "data: [DONE]\n\n"
    assert closed
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def request_with(**fields: Any) -> PruningChatRequest:
    return PruningChatRequest.model_validate({"messages": MESSAGES, **fields})


def test_only_the_chunk_with_the_usage_is_changed() -> None:
    request = request_with(retention=0.5)
    request.rendered(VisualTokens(total=4, kept=2, items=1, pruned_items=1))
    *others, last = streamed(request)
    assert others == CHUNKS[:-1]
    details = {"visual_tokens": 2, "visual_tokens_total": 4}
    assert last["usage"] == {"prompt_tokens": 3, "prompt_tokens_details": details}


def test_the_first_chunk_carries_the_id_of_an_explanation() -> None:
    request = request_with(pruning={"explain": True})
    key = request.wishes.explanation
    request.rendered(VisualTokens(total=4, kept=2, items=1, pruned_items=1))
    first, second, _ = streamed(request)
    assert first == {**CHUNKS[0], "pruning": {"id": f"{key:016x}"}}
    assert second == CHUNKS[1]


def test_requests_without_our_fields_pass_through() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    body = {"messages": MESSAGES, "visual_tokens": 7}
    assert streamed(ChatCompletionRequest.model_validate(body)) == CHUNKS


def test_an_explained_request_has_one_random_key() -> None:
    request = request_with(pruning={"explain": True})
    key = request.wishes.explanation
    assert 0 < key < 2**63
    assert request.wishes.explanation == key
    assert request_with(pruning={"explain": True}).wishes.explanation != key
    assert request_with().wishes.explanation == 0


def test_fields_are_found_on_requests_that_do_not_declare_them() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    stock = ChatCompletionRequest.model_validate({"messages": MESSAGES, "retention": 0.5})
    assert wishes_of(stock).retention == 0.5
    assert wishes_of(ChatCompletionRequest.model_validate({"messages": MESSAGES})).is_default


def test_a_batch_adds_up_its_conversations() -> None:
    batch = PruningBatchRequest.model_validate({"messages": [MESSAGES] * 2, "retention": 0.5})
    for conversation in batch.messages:
        request = batch.to_chat_completion_request(conversation)
        assert isinstance(request, PruningChatRequest)
        assert request.retention == 0.5
        request.rendered(VisualTokens(total=4, kept=2, items=1, pruned_items=1))
    assert batch.visual_tokens == VisualTokens(total=8, kept=4, items=2, pruned_items=2)

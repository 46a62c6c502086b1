"""Requests that come by other doors keep their wishes and get their counts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from fastapi.responses import JSONResponse, StreamingResponse
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from msdg_vllm.engine.api.visual_tokens import VisualTokens
from msdg_vllm.request import PruningRequest
from server.rendering import _adopt, _keep_wishes
from server.schemas import (
    PruningChatRequest,
    PruningCountRequest,
    PruningMessagesRequest,
    wishes_of,
)
from server.usage import report_message

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "retention": 0.5}
MESSAGE = {**CHAT, "pruning": {"method": "random"}, "max_tokens": 4}
COUNTS = {"visual_tokens": 64, "visual_tokens_total": 576}

to_chat = partial(_keep_wishes, AnthropicServingMessages.to_chat_completion_request)


def test_a_stock_chat_becomes_ours() -> None:
    async def stock_create(request: Any) -> Any:
        return request

    create = partial(_adopt, stock_create)

    stock = ChatCompletionRequest.model_validate({**CHAT, "temperature": 0.5})
    request = asyncio.run(create(stock))
    assert isinstance(request, PruningChatRequest)
    assert request.wishes == PruningRequest(0.5)
    assert (request.temperature, request.messages) == (0.5, stock.messages)
    assert asyncio.run(create(request)) is request


def test_a_message_keeps_its_wishes_as_a_chat() -> None:
    message = PruningMessagesRequest.model_validate(MESSAGE)
    chat = to_chat(message)
    assert isinstance(chat, PruningChatRequest)
    assert chat.wishes == PruningRequest(0.5, method="random")
    assert message.visual_tokens is None
    chat.rendered(VisualTokens(576, 64, 1, 1))
    assert message.visual_tokens == chat.visual_tokens


def test_a_message_to_be_counted_is_no_request_of_ours() -> None:
    chat = to_chat(PruningCountRequest.model_validate(MESSAGE))
    assert not isinstance(chat, PruningChatRequest)
    assert wishes_of(chat) == PruningRequest(0.5, method="random")


def test_a_message_to_be_counted_keeps_its_limit_of_tokens() -> None:
    body = {**CHAT, "retention": None, "max_visual_tokens": 64}
    chat = to_chat(PruningCountRequest.model_validate(body))
    assert wishes_of(chat) == PruningRequest(max_visual_tokens=64)


def test_an_answer_to_a_message_carries_the_counts() -> None:
    message = PruningMessagesRequest.model_validate(MESSAGE)
    to_chat(message).rendered(VisualTokens(576, 64, 1, 1))
    answer = report_message(message, JSONResponse({"usage": {"input_tokens": 3}}))
    assert json.loads(bytes(answer.body)) == {"usage": {"input_tokens": 3, **COUNTS}}
    error = JSONResponse({"type": "error"}, 400)
    assert report_message(message, error) is error


def test_a_streamed_answer_carries_the_counts() -> None:
    async def events() -> AsyncGenerator[str, None]:
        start = {"type": "message_start", "message": {"usage": {"input_tokens": 3}}}
        yield f"event: message_start\ndata: {json.dumps(start)}\n\n"
        yield "event: ping\ndata: {}\n\n"
        yield 'event: message_delta\ndata: {"usage": {"output_tokens": 1}}\n\n'

    async def collect(response: StreamingResponse) -> list[Any]:
        return [event async for event in response.body_iterator]

    message = PruningMessagesRequest.model_validate({**MESSAGE, "pruning": {"explain": True}})
    to_chat(message).rendered(VisualTokens(576, 64, 1, 1))
    response = report_message(message, StreamingResponse(events()))
    assert isinstance(response, StreamingResponse)
    start, ping, delta = asyncio.run(collect(response))
    assert json.loads(start.partition("data: ")[2])["message"] == {
        "usage": {"input_tokens": 3, **COUNTS},
        "pruning": {"id": message.explanation_id},
    }
    assert ping == "event: ping\ndata: {}\n\n"
    assert json.loads(delta.partition("data: ")[2]) == {"usage": {"output_tokens": 1, **COUNTS}}

"""Visual tokens in `usage`, and the id of an explanation, on what vLLM's handlers answer."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

from fastapi.responses import JSONResponse, Response, StreamingResponse
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.entrypoints.serve.engine.protocol import PromptTokenUsageInfo

from msdg_vllm.engine.api.visual_tokens import VisualTokens
from server.schemas import PruningFields, PruningMessagesRequest


async def report(
    generate: Callable[..., Awaitable[Any]], request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Have a whole response carry the request's counts."""
    response = await generate(request, *args, **kwargs)
    tokens = _tokens_of(request)
    if tokens is None:
        return response
    if isinstance(response, ChatCompletionResponse):
        details = response.usage.prompt_tokens_details or PromptTokenUsageInfo()
        response.usage.prompt_tokens_details = _with_counts(details, tokens)
    elif isinstance(response, ResponsesResponse) and response.usage is not None:
        _with_counts(response.usage.input_tokens_details, tokens)
    else:
        return response
    if request.report:
        response.pruning = request.report
    return response


async def report_in_stream(
    generate: Callable[..., AsyncGenerator[str, None]], request: Any, *args: Any, **kwargs: Any
) -> AsyncGenerator[str, None]:
    """Have the chunk of a chat that has the usage carry the request's counts.

    The id of an explanation and the retention that the server chose come with the first chunk.
    """
    tokens = _tokens_of(request)
    report = request.report if tokens is not None else {}
    async with aclosing(generate(request, *args, **kwargs)) as chunks:
        async for chunk in chunks:
            if report and '"choices":[{' in chunk:
                chunk = _edited(chunk, {"pruning": report})
                report = {}
            elif tokens is not None and '"choices":[]' in chunk and '"usage":{' in chunk:
                chunk = _edited(chunk, {}, details=tokens.as_details())
            yield chunk


def report_message(request: PruningMessagesRequest, response: Response) -> Response:
    """Put the counts of a request in Anthropic's format into the answer to it."""
    tokens = request.visual_tokens
    if tokens is None:
        return response
    extra = {"pruning": {"id": request.explanation_id}} if request.wants_explanation else {}
    details = tokens.as_details()
    if isinstance(response, StreamingResponse):
        response.body_iterator = _with_counted_events(response.body_iterator, extra, details)
        return response
    content = json.loads(bytes(response.body))
    if "usage" not in content:
        return response  # an error
    content["usage"] |= details
    return JSONResponse(content | extra)


async def _with_counted_events(
    events: AsyncIterable[Any], extra: Mapping[str, object], details: Mapping[str, int]
) -> AsyncGenerator[Any, None]:
    """The events that carry a usage, the first and one of the last, carry the counts too."""
    async for event in events:
        kind, _, text = str(event).partition("\ndata: ")
        if kind in ("event: message_start", "event: message_delta"):
            data = json.loads(text)
            message = data.get("message", data)
            message.get("usage", {}).update(details)
            if message is not data:
                message.update(extra)
            event = f"{kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"
        yield event


def _tokens_of(request: object) -> VisualTokens | None:
    return request.visual_tokens if isinstance(request, PruningFields) else None


def _with_counts(details: Any, tokens: VisualTokens) -> Any:
    for name, value in tokens.as_details().items():
        setattr(details, name, value)
    return details


def _edited(
    chunk: str, extra: Mapping[str, object], details: Mapping[str, int] | None = None
) -> str:
    data = json.loads(chunk.removeprefix("data: "))
    data.update(extra)
    if details is not None:
        data["usage"].setdefault("prompt_tokens_details", {}).update(details)
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"

"""Visual tokens in `usage`, and the id of an explanation, on what vLLM's handlers answer."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import wraps
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.entrypoints.serve.engine.protocol import PromptTokenUsageInfo

from server.schemas import PruningFields
from server.visual_tokens import VisualTokens


def reporting(generate: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wrap a generator of whole responses: what it returns carries the request's counts."""

    @wraps(generate)
    async def generate_and_report(request: Any, *args: Any, **kwargs: Any) -> Any:
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

    return generate_and_report


def reporting_stream(
    generate: Callable[..., AsyncGenerator[str, None]],
) -> Callable[..., AsyncGenerator[str, None]]:
    """Wrap a generator of chat chunks: the chunk with the usage carries the request's counts.

    The id of an explanation and the retention that the server chose come with the first chunk.
    """

    @wraps(generate)
    async def generate_and_report(
        request: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[str, None]:
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

    return generate_and_report


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

"""Visual tokens in `usage`: how many a request brought, how many the language model saw."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import wraps
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.entrypoints.serve.engine.protocol import PromptTokenUsageInfo

from msdg_vllm.engine.processor import SPECS


@dataclass(frozen=True, slots=True)
class VisualTokens:
    """Visual tokens of the images and videos of a request.

    Attributes:
        total: Tokens before pruning.
        kept: Tokens the language model saw.
        items: Images and videos.
        pruned_items: Those of them that lost tokens.
    """

    total: int = 0
    kept: int = 0
    items: int = 0
    pruned_items: int = 0

    @classmethod
    def of_input(cls, engine_input: Mapping[str, Any]) -> VisualTokens:
        """Count the tokens of a rendered prompt: its placeholders, and what they stand for."""
        total = kept = items = pruned_items = 0
        specs = engine_input.get(SPECS) or {}
        for modality, placeholders in (engine_input.get("mm_placeholders") or {}).items():
            if modality not in specs:
                continue
            for placeholder, spec in zip(placeholders, specs[modality], strict=True):
                num_kept = placeholder.get_num_embeds()
                kept += num_kept
                total += spec.num_tokens if spec.budget else num_kept
                items += 1
                pruned_items += bool(spec.budget)
        return cls(total, kept, items, pruned_items)

    @classmethod
    def sum(cls, counts: Iterable[VisualTokens]) -> VisualTokens:
        """Add up the counts of several prompts."""
        total = cls()
        for count in counts:
            total = cls(
                total.total + count.total,
                total.kept + count.kept,
                total.items + count.items,
                total.pruned_items + count.pruned_items,
            )
        return total

    def as_details(self) -> dict[str, int]:
        """Return the keys that join the details of a usage."""
        return {"visual_tokens": self.kept, "visual_tokens_total": self.total}


def explanation_id(request: Any) -> str | None:
    """Return the id under which a request's explanation can be had; None if it has none."""
    tokens: VisualTokens | None = request.visual_tokens
    return f"{request.explanation:016x}" if tokens is not None and tokens.pruned_items else None


def reporting(generate: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wrap a generator of whole responses: what it returns carries the request's counts."""

    @wraps(generate)
    async def generate_and_report(request: Any, *args: Any, **kwargs: Any) -> Any:
        response = await generate(request, *args, **kwargs)
        tokens = getattr(request, "visual_tokens", None)
        if tokens is None:
            return response
        if isinstance(response, ChatCompletionResponse):
            details = response.usage.prompt_tokens_details or PromptTokenUsageInfo()
            response.usage.prompt_tokens_details = _with_counts(details, tokens)
        elif isinstance(response, ResponsesResponse) and response.usage is not None:
            _with_counts(response.usage.input_tokens_details, tokens)
        else:
            return response
        if request.explanation:
            response.pruning = {"id": explanation_id(request)}
        return response

    return generate_and_report


def reporting_stream(
    generate: Callable[..., AsyncGenerator[str, None]],
) -> Callable[..., AsyncGenerator[str, None]]:
    """Wrap a generator of chat chunks: the chunk with the usage carries the request's counts.

    The id of an explanation comes with the first chunk.
    """

    @wraps(generate)
    async def generate_and_report(
        request: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[str, None]:
        tokens: VisualTokens | None = getattr(request, "visual_tokens", None)
        id_is_due = tokens is not None and request.explanation
        async with aclosing(generate(request, *args, **kwargs)) as chunks:
            async for chunk in chunks:
                if id_is_due and '"choices":[{' in chunk:
                    id_is_due = False
                    chunk = _edited(chunk, {"pruning": {"id": explanation_id(request)}})
                elif tokens is not None and '"choices":[]' in chunk and '"usage":{' in chunk:
                    chunk = _edited(chunk, {}, details=tokens.as_details())
                yield chunk

    return generate_and_report


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

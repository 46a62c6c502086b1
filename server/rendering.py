"""The way of a request's wishes into the renderer, without opening `mm_processor_kwargs`.

vLLM refuses per-request `mm_processor_kwargs` unless the operator trusts its clients. Ours join
the parameters that a request builds for the renderer, behind that check.

Chats of other doors (/invocations, /v1/messages, `run_batch`) come as stock requests. They become
ours, so that they are pruned, counted and answered like those of /v1/chat/completions.
"""

from __future__ import annotations

from dataclasses import replace
from traceback import walk_tb
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.renderers import ChatParams
from vllm.renderers.online_renderer import OnlineRenderer

from msdg_vllm.core.errors import RequestError, RetentionError
from msdg_vllm.engine.api.processor import FITTING, RESERVATION
from msdg_vllm.engine.api.visual_tokens import VisualTokens
from msdg_vllm.engine.hooks import wrap
from msdg_vllm.request import NAMES, PRUNING
from server.metrics import RequestMetrics
from server.schemas import (
    PruningChatRequest,
    PruningFields,
    PruningMessagesRequest,
    refuse_pruning_fields,
    wishes_of,
)

_NO_PLACE = "Failed to apply prompt replacement"
"""How vLLM begins to say that the prompt has no placeholder for an item."""

_MEDIA_PACKAGE = "vllm.multimodal.media"


def install(renderer: OnlineRenderer, metrics: RequestMetrics) -> None:
    """Put pruning in front of the renderer that all routes of the server share."""

    async def preprocess_chat(stock: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            conversation, engine_inputs = await stock(request, *args, **kwargs)
        except Exception as error:
            raise _as_bad_request(error, request) from error
        if isinstance(request, PruningFields):
            for engine_input in engine_inputs:
                _check_length(engine_input, renderer.model_config.max_model_len)
            tokens = VisualTokens.sum(map(VisualTokens.of_input, engine_inputs))
            tickets: list[Any] = [each.get(RESERVATION) for each in engine_inputs]
            request.rendered(tokens, [r for t in tickets if t for r in t.decision.retentions])
            metrics.count(tokens)
        return conversation, engine_inputs

    wrap(renderer, "preprocess_chat", preprocess_chat)
    wrap(renderer, "preprocess_completion", _preprocess_completion)
    for request_class in (ChatCompletionRequest, ResponsesRequest, TokenizeChatRequest):
        wrap(request_class, "build_chat_params", _build_with_wishes)


def open_doors(chat_handler: Any, messages_handler: Any) -> None:
    """Let vLLM's handlers of chats and of messages take stock requests for ours."""
    if chat_handler is not None:
        wrap(chat_handler, "create_chat_completion", _adopt)
    if messages_handler is not None:
        wrap(messages_handler, "to_chat_completion_request", _keep_wishes)


async def _adopt(stock: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(request, PruningFields):
        request = PruningChatRequest.adopt(request)
    return await stock(request, *args, **kwargs)


def _keep_wishes(stock: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    chat = stock(request, *args, **kwargs)
    if isinstance(request, PruningMessagesRequest):
        return request.become(chat)
    if isinstance(request, PruningFields):
        # Only to be counted: the fields ride along, and nobody takes it for a request.
        fields = request.model_dump(include={*NAMES}, exclude_none=True)
        for name, value in fields.items():
            setattr(chat, name, value)
    return chat


async def _preprocess_completion(stock: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    refuse_pruning_fields(getattr(request, "model_extra", None))
    return await stock(request, *args, **kwargs)


def _build_with_wishes(stock: Any, request: Any, *args: Any, **kwargs: Any) -> ChatParams:
    """Let the parameters that a request builds for the renderer carry its wishes."""
    params: ChatParams = stock(request, *args, **kwargs)
    wishes = wishes_of(request)
    if wishes.is_default:
        return params
    return replace(
        params, mm_processor_kwargs={**(params.mm_processor_kwargs or {}), PRUNING: wishes}
    )


def _check_length(engine_input: Any, max_model_len: int) -> None:
    """Say of a prompt that is too long with its images at which retention it would fit."""
    num_tokens = len(engine_input.get("prompt_token_ids", ()))
    if num_tokens <= max_model_len or FITTING not in engine_input:
        return
    num_visual = VisualTokens.of_input(engine_input).kept
    fitting = engine_input[FITTING]
    advice = (
        f"with retention {fitting} it would fit"
        if fitting
        else "no retention would make it fit: send less text or fewer images"
    )
    raise VLLMValidationError(
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt "
        f"contains {num_tokens} input tokens, {num_visual} of them of images; {advice}",
        parameter="retention" if fitting else "messages",
        value=num_tokens,
    )


def _as_bad_request(error: Exception, request: object) -> Exception:
    """Return the error that vLLM answers with a 400, or `error` when it is no client's fault."""
    if isinstance(error, RequestError):
        return VLLMValidationError(str(error), parameter=error.parameter)
    if isinstance(error, RetentionError):
        return VLLMValidationError(str(error), parameter="retention")
    if isinstance(error, VLLMError | MemoryError):
        return error
    if _comes_from_media(error):
        # Pillow and the download raise all sorts of errors; some vLLM takes for faults of its own.
        return VLLMValidationError(
            f"an image cannot be loaded: {error or type(error).__name__}; send a complete PNG, "
            "JPEG or WebP as a data: URL, or a URL that this server may and can fetch",
            parameter="image_url",
        )
    if isinstance(error, AssertionError) and (
        (limit := getattr(request, "truncate_prompt_tokens", None)) is not None
    ):
        return VLLMValidationError(
            f"truncate_prompt_tokens={limit} leaves no place for the images of the prompt; raise "
            "it, or leave it out",
            parameter="truncate_prompt_tokens",
        )
    conversation = "input" if isinstance(request, ResponsesRequest) else "messages"
    if isinstance(error, AssertionError) and str(error).startswith(_NO_PLACE):
        return VLLMValidationError(
            "the model's chat template has no place for an image or video of this prompt; leave "
            "it out, or send it as another kind",
            parameter=conversation,
        )
    if isinstance(error, ValueError):
        return VLLMValidationError(str(error), parameter=conversation)
    return error


def _comes_from_media(error: Exception) -> bool:
    """Whether an error was raised while an image was fetched or decoded."""
    frames = walk_tb(error.__traceback__)
    return any(frame.f_globals["__name__"].startswith(_MEDIA_PACKAGE) for frame, _ in frames)

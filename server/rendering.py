"""The way of a request's wishes into the renderer, without opening `mm_processor_kwargs`.

vLLM refuses per-request `mm_processor_kwargs` unless the operator trusts its clients, and ours
travel in them. So the stock check is applied to what the client sent, and only then are the
validated wishes added.
"""

from __future__ import annotations

from copy import copy
from dataclasses import asdict
from traceback import walk_tb
from typing import Any

from vllm.entrypoints.generate.base.protocol import validate_request_mm_kwargs
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.renderers.online_renderer import OnlineRenderer

from msdg_vllm.core.errors import RequestError, RetentionError
from server.metrics import RequestMetrics
from server.schemas import PruningFields, PruningOptions, pruning_fields, refuse_pruning_fields
from server.visual_tokens import VisualTokens

_MEDIA_PACKAGE = "vllm.multimodal.media"


def install(renderer: OnlineRenderer, metrics: RequestMetrics) -> None:
    """Put pruning in front of the renderer that all routes of the server share."""
    stock = copy(renderer)
    trusting = copy(renderer)
    trusting.trust_request_mm_kwargs = True

    async def preprocess_chat(request: Any, messages: list[Any], *args: Any, **kwargs: Any) -> Any:
        try:
            fields = pruning_fields(request)
            if fields is None:
                return await stock.preprocess_chat(request, messages, *args, **kwargs)
            own_kwargs = getattr(request, "mm_processor_kwargs", None)
            validate_request_mm_kwargs(
                mm_processor_kwargs=own_kwargs,
                media_io_kwargs=getattr(request, "media_io_kwargs", None),
                trust_request_mm_kwargs=stock.trust_request_mm_kwargs,
            )
            wishes = asdict(fields.pruning_request())
            request.mm_processor_kwargs = {
                **(own_kwargs or {}),
                **{name: value for name, value in wishes.items() if value is not None},
            }
            try:
                conversation, engine_inputs = await trusting.preprocess_chat(
                    request, messages, *args, **kwargs
                )
            finally:
                request.mm_processor_kwargs = own_kwargs
        except Exception as error:
            raise _as_bad_request(error, request) from error
        if isinstance(request, PruningFields):
            tokens = VisualTokens.sum(map(VisualTokens.of_input, engine_inputs))
            request.rendered(tokens)
            metrics.count(tokens)
        return conversation, engine_inputs

    async def preprocess_completion(request: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_pruning_fields(getattr(request, "model_extra", None), "a prompt without messages")
        return await stock.preprocess_completion(request, *args, **kwargs)

    renderer.preprocess_chat = preprocess_chat  # type: ignore[method-assign]
    renderer.preprocess_completion = preprocess_completion  # type: ignore[method-assign]


def _as_bad_request(error: Exception, request: object) -> Exception:
    """Return the error that vLLM answers with a 400, or `error` when it is no client's fault."""
    if isinstance(error, RequestError):
        is_option = error.parameter in PruningOptions.model_fields
        parameter = f"pruning.{error.parameter}" if is_option else error.parameter
        return VLLMValidationError(str(error), parameter=parameter)
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
    if isinstance(error, ValueError):
        conversation = "input" if isinstance(request, ResponsesRequest) else "messages"
        return VLLMValidationError(str(error), parameter=conversation)
    return error


def _comes_from_media(error: Exception) -> bool:
    """Whether an error was raised while a picture was fetched or decoded."""
    frames = walk_tb(error.__traceback__)
    return any(frame.f_globals["__name__"].startswith(_MEDIA_PACKAGE) for frame, _ in frames)

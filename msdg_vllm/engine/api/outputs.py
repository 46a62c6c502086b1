"""What was kept of a request's images, on its outputs and on its span in a trace.

Fills a gap: vLLM makes outputs and spans of what came back from the engine, which no longer knows
how many tokens there were before pruning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextvars import ContextVar
from functools import wraps
from typing import Any

from vllm.tracing import SpanAttributes
from vllm.v1.engine import output_processor
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from msdg_vllm.engine.api.pixels import PIXELS, name_pixels
from msdg_vllm.engine.api.visual_tokens import VisualTokens
from msdg_vllm.engine.tracing import attributes_in

# Requests that never end as they should, such as those a client leaves, are forgotten one day.
_MAX_REQUESTS = 10_000
_REQUESTS: OrderedDict[str, VisualTokens] = OrderedDict()
_trace_headers: ContextVar[Mapping[str, str] | None] = ContextVar("trace_headers", default=None)


def install() -> None:
    """Put the counts on everything that leaves the engine; again changes nothing."""
    if hasattr(InputProcessor.process_inputs, "__wrapped__"):
        return
    for owner, name, wrap in (
        (InputProcessor, "process_inputs", _remembering),
        (RequestState, "_new_request_output", _counting),
        (OutputProcessor, "do_tracing", _hearing_of_workers),
        (output_processor, "instrument_manual", _describing),
    ):
        setattr(owner, name, wrap(getattr(owner, name)))


def _remembering(process_inputs: Any) -> Any:
    @wraps(process_inputs)
    def process(self: Any, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        _REQUESTS.pop(request_id, None)  # another engine of this process may count from 0 again
        if isinstance(prompt, dict) and (tokens := VisualTokens.of_input(prompt)).items:
            _REQUESTS[request_id] = tokens
            if len(_REQUESTS) > _MAX_REQUESTS:
                _REQUESTS.popitem(last=False)
        request = process_inputs(self, request_id, prompt, *args, **kwargs)
        if isinstance(prompt, dict) and (hashes := prompt.get(PIXELS)):
            name_pixels(request.mm_features, hashes)
        return request

    return process


def _counting(new_request_output: Any) -> Any:
    @wraps(new_request_output)
    def make(self: Any, external_req_id: str, *args: Any, **kwargs: Any) -> Any:
        output = new_request_output(self, external_req_id, *args, **kwargs)
        if (tokens := _REQUESTS.get(external_req_id)) is not None:
            output.visual_tokens = tokens
        return output

    return make


def _hearing_of_workers(do_tracing: Any) -> Any:
    @wraps(do_tracing)
    def trace(self: Any, engine_core_output: Any, *args: Any, **kwargs: Any) -> None:
        before = _trace_headers.set(engine_core_output.trace_headers)
        try:
            do_tracing(self, engine_core_output, *args, **kwargs)
        finally:
            _trace_headers.reset(before)

    return trace


def _describing(instrument_manual: Any) -> Any:
    @wraps(instrument_manual)
    def instrument(*args: Any, attributes: dict[str, Any], **kwargs: Any) -> Any:
        request_id = attributes.get(SpanAttributes.GEN_AI_REQUEST_ID, "")
        if (tokens := _REQUESTS.get(request_id)) is not None:
            own = {**tokens.as_span_attributes(), **attributes_in(_trace_headers.get() or {})}
            attributes = {**attributes, **own}
        return instrument_manual(*args, attributes=attributes, **kwargs)

    return instrument

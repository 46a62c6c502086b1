"""How many visual tokens a request brought and kept; its outputs and its span say so.

Fills a gap: vLLM makes outputs and spans of what came back from the engine, which no longer knows
how many tokens there were before pruning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from vllm.tracing import SpanAttributes
from vllm.v1.engine import output_processor
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from msdg_vllm.engine.api.pixels import PIXELS, name_pixels
from msdg_vllm.engine.api.processor import SPECS
from msdg_vllm.engine.hooks import wrap
from msdg_vllm.engine.tracing import attributes_in


@dataclass(frozen=True, slots=True)
class VisualTokens:
    """Visual tokens of the images and videos of a request.

    Attributes:
        total: Tokens before pruning.
        kept: Tokens the language model saw.
        items: Images and videos.
        pruned_items: Those of them that lost tokens.
        methods: Names of the methods that selected, in alphabetical order.
    """

    total: int = 0
    kept: int = 0
    items: int = 0
    pruned_items: int = 0
    methods: tuple[str, ...] = ()

    @classmethod
    def of_input(cls, engine_input: Mapping[str, Any]) -> VisualTokens:
        """Count the tokens of a rendered prompt: its placeholders, and what they stand for."""
        total = kept = items = pruned_items = 0
        specs = engine_input.get(SPECS) or {}
        for modality, placeholders in (engine_input.get("mm_placeholders") or {}).items():
            if modality not in specs:
                continue
            for placeholder, spec in zip(placeholders, specs[modality], strict=True):
                # The placeholders of a pruned video may stand for its timestamps too.
                num_kept = spec.budget or placeholder.get_num_embeds()
                kept += num_kept
                total += (spec.scaled_from or spec.num_tokens) if spec.budget else num_kept
                items += 1
                pruned_items += bool(spec.budget)
        methods = {spec.method for found in specs.values() for spec in found if spec.budget}
        return cls(total, kept, items, pruned_items, tuple(sorted(methods)))

    @classmethod
    def sum(cls, counts: Iterable[VisualTokens]) -> VisualTokens:
        """Add up the counts of several prompts."""
        every = list(counts)
        return cls(
            sum(one.total for one in every),
            sum(one.kept for one in every),
            sum(one.items for one in every),
            sum(one.pruned_items for one in every),
            tuple(sorted({method for one in every for method in one.methods})),
        )

    def as_details(self) -> dict[str, int]:
        """Return the keys that join the details of a usage."""
        return {"visual_tokens": self.kept, "visual_tokens_total": self.total}

    def as_span_attributes(self) -> dict[str, str | int | float]:
        """Return the attributes that join those of a request's span in a trace."""
        return {
            "msdg.retention": round(self.kept / self.total, 4) if self.total else 1.0,
            "msdg.method": ",".join(self.methods),
            "msdg.visual_tokens": self.kept,
            "msdg.visual_tokens_total": self.total,
        }


# Requests that never end as they should, such as those a client leaves, are forgotten one day.
_MAX_REQUESTS = 10_000
_REQUESTS: OrderedDict[str, VisualTokens] = OrderedDict()
_trace_headers: ContextVar[Mapping[str, str] | None] = ContextVar("trace_headers", default=None)


def install() -> None:
    """Put the counts on everything that leaves the engine; again changes nothing."""
    wrap(InputProcessor, "process_inputs", _remember)
    wrap(RequestState, "_new_request_output", _count)
    wrap(OutputProcessor, "do_tracing", _hear_of_workers)
    wrap(output_processor, "instrument_manual", _describe)


def _remember(
    stock: Any, self: Any, request_id: str, prompt: Any, *args: Any, **kwargs: Any
) -> Any:
    _REQUESTS.pop(request_id, None)  # another engine of this process may count from 0 again
    if isinstance(prompt, dict) and (tokens := VisualTokens.of_input(prompt)).items:
        _REQUESTS[request_id] = tokens
        if len(_REQUESTS) > _MAX_REQUESTS:
            _REQUESTS.popitem(last=False)
    request = stock(self, request_id, prompt, *args, **kwargs)
    if isinstance(prompt, dict) and (hashes := prompt.get(PIXELS)):
        name_pixels(request.mm_features, hashes)
    return request


def _count(stock: Any, self: Any, external_req_id: str, *args: Any, **kwargs: Any) -> Any:
    output = stock(self, external_req_id, *args, **kwargs)
    if (tokens := _REQUESTS.get(external_req_id)) is not None:
        output.visual_tokens = tokens
    return output


def _hear_of_workers(
    stock: Any, self: Any, engine_core_output: Any, *args: Any, **kwargs: Any
) -> None:
    before = _trace_headers.set(engine_core_output.trace_headers)
    try:
        stock(self, engine_core_output, *args, **kwargs)
    finally:
        _trace_headers.reset(before)


def _describe(stock: Any, *args: Any, attributes: dict[str, Any], **kwargs: Any) -> Any:
    request_id = attributes.get(SpanAttributes.GEN_AI_REQUEST_ID, "")
    if (tokens := _REQUESTS.get(request_id)) is not None:
        own = {**tokens.as_span_attributes(), **attributes_in(_trace_headers.get() or {})}
        attributes = {**attributes, **own}
    return stock(*args, attributes=attributes, **kwargs)

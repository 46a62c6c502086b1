"""Visual tokens of a rendered prompt; outputs and spans carry what was kept of its images."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm.multimodal.inputs import PlaceholderRange

from msdg_vllm.engine.api import visual_tokens
from msdg_vllm.engine.api.processor import SPECS
from msdg_vllm.engine.api.visual_tokens import VisualTokens
from msdg_vllm.engine.spec import UNPRUNED, PruningSpec

TOKENS = VisualTokens(total=576, kept=64, items=1, pruned_items=1, methods=("msdg",))


@pytest.fixture(autouse=True)
def forget() -> Any:
    yield
    visual_tokens._REQUESTS.clear()


def prompt(budget: int = 64) -> dict[str, Any]:
    placeholder = SimpleNamespace(get_num_embeds=lambda: budget)
    return {
        "mm_placeholders": {"image": [placeholder]},
        SPECS: {"image": [PruningSpec(budget=budget, num_tokens=576)]},
    }


def process(request_id: str, sent: Any) -> None:
    visual_tokens._remember(lambda *args, **kwargs: None, None, request_id=request_id, prompt=sent)


def test_an_output_carries_the_counts_of_its_request() -> None:
    def stock(self: object, request_id: str, found: int) -> SimpleNamespace:
        return SimpleNamespace(found=found)

    make = partial(visual_tokens._count, stock)
    process("a", prompt())
    process("b", {"prompt_token_ids": [1]})
    assert make(None, "a", 7).visual_tokens == TOKENS
    assert make(None, "a", 8).found == 8
    assert not hasattr(make(None, "b", 7), "visual_tokens")
    process("a", {"prompt_token_ids": [1]})
    assert not hasattr(make(None, "a", 9), "visual_tokens")


def test_only_so_many_requests_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visual_tokens, "_MAX_REQUESTS", 2)
    for name in "abc":
        process(name, prompt())
    assert list(visual_tokens._REQUESTS) == ["b", "c"]


def test_the_span_of_a_request_says_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry import trace
    from vllm.tracing import SpanAttributes
    from vllm.tracing.otel import manual_instrument_otel

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    instrument = partial(visual_tokens._describe, manual_instrument_otel)
    process("a", prompt())
    for request_id in ("a", "b"):
        attributes = {SpanAttributes.GEN_AI_REQUEST_ID: request_id}
        instrument(span_name="llm_request", start_time=1, attributes=attributes)
    pruned, plain = (dict(span.attributes or {}) for span in exporter.get_finished_spans())
    assert pruned == {
        SpanAttributes.GEN_AI_REQUEST_ID: "a",
        "msdg.retention": 0.1111,
        "msdg.method": "msdg",
        "msdg.visual_tokens": 64,
        "msdg.visual_tokens_total": 576,
        "msdg.encoder_ran": False,
        "msdg.selection_seconds": 0.0,
    }
    assert plain == {SpanAttributes.GEN_AI_REQUEST_ID: "b"}


def test_a_span_hears_of_the_workers_while_it_is_made() -> None:
    heard = []
    trace = partial(
        visual_tokens._hear_of_workers,
        lambda *_: heard.append(visual_tokens._trace_headers.get()),
    )
    trace(None, SimpleNamespace(trace_headers={"of": "this one"}), "state", "statistics")
    assert heard == [{"of": "this one"}]
    assert visual_tokens._trace_headers.get() is None


def test_text_within_an_item_is_not_counted() -> None:
    is_embed = torch.tensor([False, True, True, False])
    placeholders = [
        PlaceholderRange(offset=0, length=60),  # 42 tokens of text, which the model embeds
        PlaceholderRange(offset=60, length=4, is_embed=is_embed),
    ]
    pruned = PruningSpec(budget=18, num_tokens=72)
    counted = VisualTokens.of_input(
        {SPECS: {"video": [pruned, UNPRUNED]}, "mm_placeholders": {"video": placeholders}}
    )
    assert (counted.kept, counted.total) == (18 + 2, 72 + 2)
    assert (counted.items, counted.pruned_items) == (2, 1)

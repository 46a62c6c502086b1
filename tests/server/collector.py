"""A collector of traces, as an operator runs one: the spans that a server sends, by request."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from vllm.tracing import SpanAttributes

from tests.loopback import Handler, listening

WAIT_SECONDS = 30


class Collector:
    """What came in, as attributes by the id of their request."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: dict[str, dict[str, Any]] = {}

    @property
    def environment(self) -> dict[str, str]:
        """What makes a server send its spans here, and soon."""
        protocol = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
        return {**protocol, "OTEL_BSP_SCHEDULE_DELAY": "100"}

    def take(self, body: bytes) -> None:
        """Keep the spans of one delivery."""
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                values = {
                    item.key: getattr(item.value, str(item.value.WhichOneof("value")))
                    for item in span.attributes
                }
                self.spans[values.get(SpanAttributes.GEN_AI_REQUEST_ID, "")] = values

    def span_of(self, request_id: str) -> dict[str, Any]:
        """The attributes of a request's span, once it has come."""
        deadline = time.monotonic() + WAIT_SECONDS
        while request_id not in self.spans and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.spans[request_id]


@contextmanager
def collecting() -> Iterator[Collector]:
    """Listen on a port of loopback."""

    class Receiving(Handler):
        def do_POST(self) -> None:
            collector.take(self.body())
            self.answer(200)

    collector = Collector("")
    with listening(Receiving) as url:
        collector.url = f"{url}/v1/traces"
        yield collector

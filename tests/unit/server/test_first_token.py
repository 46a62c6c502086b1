"""The time to first token goes into the bucket of what the request kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from msdg_vllm.engine.api.visual_tokens import VisualTokens
from server.metrics import watch_first_tokens


class Engine:
    """An engine that answers every prompt with three outputs."""

    closed = False

    async def generate(self, prompt: Any, *args: Any) -> AsyncGenerator[Any, None]:
        try:
            for _ in range(3):
                yield SimpleNamespace(metrics=prompt["metrics"])
        finally:
            self.closed = True


class Metrics:
    """What was observed."""

    def __init__(self) -> None:
        self.observed: list[tuple[VisualTokens, float]] = []

    def observe_first_token(self, tokens: VisualTokens, seconds: float) -> None:
        self.observed.append((tokens, seconds))


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def engine(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(VisualTokens, "of_input", lambda prompt: prompt["tokens"])
    engine = Engine()
    watch_first_tokens(engine, metrics)  # type: ignore[arg-type]
    return engine


async def outputs_of(engine: Engine, prompt: object, limit: int = 3) -> int:
    count = 0
    outputs = engine.generate(prompt)
    async for _ in outputs:
        count += 1
        if count == limit:
            break
    await outputs.aclose()
    return count


IMAGES = VisualTokens(total=576, kept=64, items=1, pruned_items=1)
TIMES = SimpleNamespace(first_token_latency=0.25)


def test_a_request_with_images_is_timed_once(engine: Engine, metrics: Metrics) -> None:
    assert asyncio.run(outputs_of(engine, {"tokens": IMAGES, "metrics": TIMES})) == 3
    assert metrics.observed == [(IMAGES, 0.25)]


@pytest.mark.parametrize(
    "prompt",
    [
        {"tokens": VisualTokens(), "metrics": TIMES},
        {"tokens": IMAGES, "metrics": None},
    ],
    ids=["no images", "vLLM measures no times"],
)
def test_others_are_passed_on_untimed(engine: Engine, metrics: Metrics, prompt: object) -> None:
    assert asyncio.run(outputs_of(engine, prompt)) == 3
    assert metrics.observed == []


def test_a_client_that_leaves_ends_the_request_in_the_engine(engine: Engine) -> None:
    asyncio.run(outputs_of(engine, {"tokens": IMAGES, "metrics": TIMES}, limit=1))
    assert engine.closed

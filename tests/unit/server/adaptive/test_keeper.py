"""Requests on their way through a server: decided, watched, and never forgotten."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from msdg_vllm.engine.api.budgets import OpenItem
from msdg_vllm.engine.api.processor import RESERVATION
from server.adaptive.controller import Controller
from server.adaptive.keeper import TargetKeeper
from server.adaptive.metrics import AdaptiveMetrics
from tests.unit.server.adaptive.queueing import PrivateLoad

ITEMS = [OpenItem("a picture", 576)]


@pytest.fixture(scope="module")
def metrics() -> AdaptiveMetrics:
    return AdaptiveMetrics("keeper-test")


@pytest.fixture
def keeper(metrics: AdaptiveMetrics) -> TargetKeeper:
    return TargetKeeper(Controller(PrivateLoad(), target=1.0, floor=0.1, ceiling=1.0), metrics)


def waiting(keeper: TargetKeeper) -> float:
    """Requests that were sent and have no first token."""
    load: Any = keeper.controller._load
    return sum(slot.work[0] for slot in load.load.slots)


class Engine:
    """Gives outputs, or fails before the first."""

    def __init__(self, num_outputs: int = 2, failure: Exception | None = None) -> None:
        self.num_outputs = num_outputs
        self.failure = failure

    async def generate(self, prompt: Any) -> AsyncGenerator[Any, None]:
        if self.failure is not None:
            raise self.failure
        for _ in range(self.num_outputs):
            yield SimpleNamespace(num_cached_tokens=None)


async def run(engine: Any, prompt: Any) -> int:
    return len([output async for output in engine.generate(prompt)])


def test_a_first_token_ends_the_wait(keeper: TargetKeeper) -> None:
    engine = Engine()
    keeper.watch(engine)  # type: ignore[arg-type]
    retentions, ticket = keeper.choose(ITEMS, 20, 576)
    assert retentions == [1.0]
    assert waiting(keeper) == 1
    assert asyncio.run(run(engine, {RESERVATION: ticket})) == 2
    assert waiting(keeper) == 0
    assert not ticket.decision.reservation.is_open


def test_text_alone_is_work_too(keeper: TargetKeeper) -> None:
    engine = Engine(num_outputs=1)
    keeper.watch(engine)  # type: ignore[arg-type]
    load: Any = keeper.controller._load
    asyncio.run(run(engine, {"prompt_token_ids": [1] * 50}))
    assert load.load.num_measured == 1


def test_a_failed_request_no_longer_waits(keeper: TargetKeeper) -> None:
    engine = Engine(failure=RuntimeError("no room"))
    keeper.watch(engine)  # type: ignore[arg-type]
    _, ticket = keeper.choose(ITEMS, 20, 576)
    with pytest.raises(RuntimeError, match="no room"):
        asyncio.run(run(engine, {RESERVATION: ticket}))
    assert waiting(keeper) == 0


def test_a_prompt_that_never_reaches_the_engine_no_longer_waits(keeper: TargetKeeper) -> None:
    _, ticket = keeper.choose(ITEMS, 20, 576)
    assert waiting(keeper) == 1
    del ticket
    gc.collect()
    assert waiting(keeper) == 0

"""When a server says that it lives and that it takes requests."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from server.probes import LIVE_SECONDS, READY_SECONDS, Condition, Heart
from server.shutdown import Traffic

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Silence:
    """Workers that stop answering when they are told to, and a clock to wait with."""

    def __init__(self) -> None:
        self.now = 0.0
        self.answers = asyncio.Event()
        self.answers.set()
        self.heart = Heart(self.answers.wait, lambda: self.now, beat_seconds=0)


def condition(heart: Heart, *, limit: int | None = None, **engine: Any) -> Condition:
    client: Any = SimpleNamespace(
        errored=engine.get("errored", False),
        vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(max_num_queued_reqs=limit)),
        admission_stats=engine.get("admission_stats"),
        get_num_unfinished_requests=lambda: engine.get("num_requests", 0),
    )
    return Condition(client, heart, engine.get("traffic", Traffic()))


def resting() -> Heart:
    return Silence().heart


@pytest.mark.parametrize(
    ("seconds", "ready", "alive"),
    [
        (READY_SECONDS - 1, True, True),
        (READY_SECONDS + 1, False, True),
        (LIVE_SECONDS + 1, False, False),
    ],
)
async def test_workers_that_do_not_answer_are_noticed(
    seconds: float, ready: bool, alive: bool
) -> None:
    silence = Silence()
    told = condition(silence.heart)
    beating = asyncio.create_task(silence.heart.beat())
    for _ in range(5):
        await asyncio.sleep(0)
    silence.answers.clear()
    assert told.why_not_ready() is told.why_not_alive() is None  # a question goes out
    for _ in range(5):
        await asyncio.sleep(0)
    silence.now += seconds
    assert (told.why_not_ready() is None, told.why_not_alive() is None) == (ready, alive)
    silence.answers.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert told.why_not_ready() is told.why_not_alive() is None
    beating.cancel()


async def test_a_server_that_nobody_probes_asks_nothing() -> None:
    asked = 0

    async def ask() -> None:
        nonlocal asked
        asked += 1

    heart = Heart(ask, lambda: 0.0, beat_seconds=0)
    beating = asyncio.create_task(heart.beat())
    for _ in range(9):
        await asyncio.sleep(0)
    assert asked == 0
    heart.silence()
    for _ in range(9):
        await asyncio.sleep(0)
    assert asked == 1
    beating.cancel()


def test_a_failed_engine_is_neither_alive_nor_ready() -> None:
    told = condition(resting(), errored=True)
    assert "failed" in str(told.why_not_alive())
    assert "failed" in str(told.why_not_ready())


def test_a_full_queue_is_alive_but_not_ready() -> None:
    told = condition(resting(), limit=4, num_requests=4)
    assert told.why_not_alive() is None
    assert "queue is full" in str(told.why_not_ready())
    assert condition(resting(), limit=4, num_requests=3).why_not_ready() is None
    assert condition(resting(), num_requests=1000).why_not_ready() is None


def test_the_queue_is_that_of_all_processes() -> None:
    shared = SimpleNamespace(get_num_requests=lambda: 4)
    told = condition(resting(), limit=4, num_requests=1, admission_stats=shared)
    assert "queue is full" in str(told.why_not_ready())


def test_a_stopping_server_is_alive_but_not_ready() -> None:
    traffic = Traffic()
    traffic.draining = True
    told = condition(resting(), traffic=traffic)
    assert told.why_not_alive() is None
    assert "stopping" in str(told.why_not_ready())

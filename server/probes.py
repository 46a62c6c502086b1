"""Whether the server lives, and whether it should get requests.

Fills a gap: vLLM's /health notices an engine that has died, not one that hangs, and knows neither
overload nor the drain before a stop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from vllm.engine.protocol import EngineClient

from server.shutdown import Traffic, traffic

BEAT_SECONDS = 5.0
READY_SECONDS = 10.0
"""Without an answer of the workers for so long, other replicas should get the requests."""
LIVE_SECONDS = 60.0
"""Without an answer for so long, the server should be started again.

Workers answer between two steps, so this must be longer than any step.
"""

router = APIRouter()


class Heart:
    """Asks the workers for a sign of life while probes are read, one question at a time.

    A worker that was asked something looks for more work for a second without a pause, so a server
    that nobody probes does not ask.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[Any]],
        clock: Callable[[], float] = time.monotonic,
        beat_seconds: float = BEAT_SECONDS,
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._beat_seconds = beat_seconds
        self._asked: float | None = None
        self._wanted = asyncio.Event()

    def silence(self) -> float:
        """How many seconds the open question has waited for its answer; have another asked."""
        self._wanted.set()
        return 0.0 if self._asked is None else self._clock() - self._asked

    async def beat(self) -> None:
        """Ask until the engine is gone; a question without an answer stays open."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            self._asked = self._clock()
            await self._ask()
            self._asked = None
            await asyncio.sleep(self._beat_seconds)


class Condition:
    """What probes are told."""

    def __init__(
        self, engine_client: EngineClient, heart: Heart, traffic: Traffic = traffic
    ) -> None:
        self._engine_client: Any = engine_client
        self._heart = heart
        self._traffic = traffic

    def why_not_alive(self) -> str | None:
        """Return what only a restart can mend; None if all is well."""
        if self._engine_client.errored:
            return "the engine has failed"
        if (seconds := self._heart.silence()) > LIVE_SECONDS:
            return f"the workers have not answered for {seconds:.0f} s"
        return None

    def why_not_ready(self) -> str | None:
        """Return why requests should go elsewhere for now; None if they are welcome."""
        if self._traffic.draining:
            return "the server is stopping"
        if (reason := self.why_not_alive()) is not None:
            return reason
        if (seconds := self._heart.silence()) > READY_SECONDS:
            return f"the workers have not answered for {seconds:.0f} s"
        limit = self._engine_client.vllm_config.scheduler_config.max_num_queued_reqs
        if limit is not None and self._num_requests() >= limit:
            return f"the queue is full: --max-num-queued-reqs is {limit}"
        return None

    def _num_requests(self) -> int:
        shared = self._engine_client.admission_stats  # there only with several API processes
        if shared is not None:
            return int(shared.get_num_requests())
        return int(self._engine_client.get_num_unfinished_requests())


@router.get("/health/live")
async def show_liveness(raw_request: Request) -> JSONResponse:
    """Say whether the server works; if not, it should be started again."""
    return _answer(raw_request.app.state.msdg_condition.why_not_alive())


@router.get("/health/ready")
async def show_readiness(raw_request: Request) -> JSONResponse:
    """Say whether the server takes requests: it works, is not stopping and has room."""
    return _answer(raw_request.app.state.msdg_condition.why_not_ready())


def _answer(problem: str | None) -> JSONResponse:
    if problem is None:
        return JSONResponse({"status": "ok"})
    body = {"status": "unavailable", "reason": problem}
    return JSONResponse(body, HTTPStatus.SERVICE_UNAVAILABLE)

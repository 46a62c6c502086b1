"""How the server ends: new requests are refused, running ones finish or are told, then it is gone.

Fills gaps: vLLM stops the engine while streams still wait for it, and then waits for those streams
without a limit; a new request meanwhile is a 500; and a crash ends with exit code 0.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from types import FrameType
from typing import Any

from starlette.datastructures import MutableHeaders, State
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.engine.protocol import EngineClient
from vllm.logger import init_logger

from msdg_vllm.console import PROBE_PATHS
from msdg_vllm.engine.hooks import wrap
from server.refusals import refusal

logger = init_logger(f"vllm.{__name__}")

DEFAULT_TIMEOUT = 25
"""Seconds that running requests may take after SIGTERM; Kubernetes kills after 30."""

RETRY_SECONDS = 1

_ABORT_SECONDS = 2.0
_ENGINE_SECONDS = 5.0
_HANGING_SECONDS = 10.0
_START_SECONDS = 10.0
_INTERRUPTED = 130


class Traffic:
    """The requests of this process that are not answered yet, and whether more are welcome.

    Attributes:
        in_flight: How many there are.
        draining: Whether the process is ending.
        engine_failed: Whether it ends because the engine did.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self.draining = False
        self.engine_failed = False

    def wait(self, seconds: float) -> bool:
        """Wait until all are answered; say whether they are. Not for the event loop's thread."""
        deadline = time.monotonic() + seconds
        while self.in_flight and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.in_flight


traffic = Traffic()


class Availability:
    """Counts requests, refuses new ones during a drain, and says when to try again after a 503."""

    def __init__(self, app: ASGIApp, traffic: Traffic = traffic) -> None:
        self.app = app
        self.traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with a 503."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path in PROBE_PATHS:
            return await self.app(scope, receive, send)
        if self.traffic.draining:
            stopping = refusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the server is stopping and takes no new requests; send this one again, it will "
                "reach the next server",
                {"Retry-After": str(RETRY_SECONDS), "Connection": "close"},
            )
            return await stopping(scope, receive, send)

        async def send_with_retry(message: Message) -> None:
            unavailable = HTTPStatus.SERVICE_UNAVAILABLE
            if message["type"] == "http.response.start" and message["status"] == unavailable:
                MutableHeaders(scope=message).setdefault("Retry-After", str(RETRY_SECONDS))
            await send(message)

        self.traffic.in_flight += 1
        try:
            await self.app(scope, receive, send_with_retry)
        finally:
            self.traffic.in_flight -= 1


def install(engine_client: EngineClient, state: State) -> None:
    """Let running requests end before vLLM stops the engine, and end the process for certain."""
    loop = asyncio.get_running_loop()

    def abort_all() -> None:
        requests: Any = engine_client.output_processor.request_states  # type: ignore[attr-defined]
        abortion = engine_client.abort(list(requests), internal=True)  # type: ignore[call-arg]
        asyncio.run_coroutine_threadsafe(abortion, loop).result(_ABORT_SECONDS)

    def shutdown(stock: Callable[..., None], timeout: float | None = None) -> None:
        is_first, traffic.draining = not traffic.draining, True
        if is_first:
            # Asked for by a signal while the engine works, or by its end.
            traffic.engine_failed = engine_client.errored
            if hasattr(state, "server"):  # `run_batch` has none, and still writes its answers
                _leave_after((timeout or 0) + _ENGINE_SECONDS + _HANGING_SECONDS)
        if not is_first or traffic.engine_failed or not timeout or not loop.is_running():
            stock(timeout=timeout)
            return
        logger.info("Draining: %d requests have %s s to end.", traffic.in_flight, timeout)
        # What vLLM's own parent of several API processes waits for includes the rest.
        if not traffic.wait(max(0.5, timeout - _ABORT_SECONDS - 1)):
            logger.warning("Draining: %d requests are aborted.", traffic.in_flight)
            try:
                abort_all()
            except Exception as error:  # the engine may be gone or stuck
                logger.warning("Draining: could not abort: %r", error)
            traffic.wait(_ABORT_SECONDS)
        stock(timeout=_ENGINE_SECONDS)
        # Connections that are still open would keep uvicorn waiting without a limit.
        state.server.force_exit = bool(traffic.in_flight)

    wrap(engine_client, "shutdown", shutdown)


def guard_start(entry: Any) -> None:
    """Let SIGTERM end a server in time that is still starting.

    vLLM's handler interrupts its main thread; what waits for an engine that the same signal has
    ended may go on waiting.

    Args:
        entry: The module of vLLM that runs an API server; it installs its handler and then calls
            `setup_server`. Once the server is up, it takes other handlers.
    """

    def setup_server(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        interrupt: Any = signal.getsignal(signal.SIGTERM)

        def end(number: int, frame: FrameType | None) -> None:
            _leave_after(_START_SECONDS, _INTERRUPTED)
            interrupt(number, frame)

        signal.signal(signal.SIGTERM, end)
        return stock(*args, **kwargs)

    wrap(entry, "setup_server", setup_server)


def _leave_after(seconds: float, code: int = 1) -> None:
    """End the process if nothing else has ended it by then."""

    def leave() -> None:
        logger.error("The server did not stop within %s s: it is ended now.", seconds)
        os._exit(code)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()

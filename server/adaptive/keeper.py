"""The controller at work: asked when a prompt is rendered, told of every first token."""

from __future__ import annotations

import hashlib
import math
import os
import time
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.logger import init_logger
from vllm.outputs import RequestOutput

from msdg_vllm.engine.api.budgets import OpenItem
from msdg_vllm.engine.api.processor import RESERVATION
from msdg_vllm.engine.hooks import wrap
from msdg_vllm.settings import Settings
from server.adaptive.controller import Arrival, Controller, Decision, Image, Status
from server.adaptive.metrics import AdaptiveMetrics
from server.adaptive.state import LOAD_FILE_VARIABLE, SharedLoad

logger = init_logger(f"vllm.{__name__}")

DEFAULT_FLOOR = 0.111
"""The lowest retention that is chosen where the operator named no floor."""

_LOG_SECONDS = 10.0


class Ticket:
    """A decision about a request; whatever becomes of it, its reservation ends with this object."""

    def __init__(self, controller: Controller, decision: Decision) -> None:
        self.decision = decision
        # A prompt that is only counted, or that fails on its way, is simply forgotten.
        self._finalizer = weakref.finalize(self, controller.abandon, decision.reservation)


class TargetKeeper:
    """Chooses the retention of images that leave it open, so that first tokens come in time."""

    def __init__(self, controller: Controller, metrics: AdaptiveMetrics) -> None:
        self.controller = controller
        self._metrics = metrics
        self._level = controller.rungs[0]
        self._logged = 0.0

    def choose(
        self, items: Sequence[OpenItem], fixed_tokens: int, encoder_tokens: int
    ) -> tuple[Sequence[float], Ticket]:
        """Return a retention for each item, and the ticket of their request."""
        images = [
            Image(
                _number(item.identity),
                item.num_tokens,
                math.inf if item.most is None else item.most,
            )
            for item in items
        ]
        ticket = self._arrive(Arrival(fixed_tokens, encoder_tokens, images))
        self._metrics.count(ticket.decision)
        return ticket.decision.retentions, ticket

    def watch(self, engine_client: EngineClient) -> None:
        """See every request of this process on its way to the engine; text alone is work too."""

        def generate(stock: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
            ticket = prompt.get(RESERVATION) if isinstance(prompt, Mapping) else None
            if ticket is None:
                ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
                ticket = self._arrive(Arrival(len(ids or ())))
            return self._watched(stock(prompt, *args, **kwargs), ticket)

        wrap(engine_client, "generate", generate)

    def refresh(self) -> Status:
        """Bring the gauges up to date, which nothing else does while no request comes."""
        status = self.controller.status(time.monotonic())
        self._metrics.show(status)
        return status

    async def _watched(
        self, outputs: AsyncGenerator[RequestOutput, None], ticket: Ticket
    ) -> AsyncGenerator[RequestOutput, None]:
        reservation = ticket.decision.reservation
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    if reservation.is_open:
                        now = time.monotonic()
                        self.controller.first_token(reservation, now, output.num_cached_tokens or 0)
                        self._metrics.observe(ticket.decision, now)
                        self._log(now)
                    yield output
        finally:
            self.controller.release(reservation)

    def _arrive(self, arrival: Arrival) -> Ticket:
        now = time.monotonic()
        return Ticket(self.controller, self.controller.arrive(arrival, now))

    def _log(self, now: float) -> None:
        """Say that the level has moved, or that the target cannot be held, now and then."""
        if now - self._logged < _LOG_SECONDS:
            return
        status = self.refresh()
        if status.is_overloaded:
            logger.warning(
                "The target of %.2f s to the first token cannot be held at the floor %s: 95 %% of "
                "the last requests waited up to %.2f s",
                self.controller.target,
                status.level,
                status.measured_p95_seconds,
            )
        elif status.level != self._level:
            logger.info(
                "Images now keep %s of their tokens (before: %s)", status.level, self._level
            )
        else:
            return
        self._level, self._logged = status.level, now


def start_keeper(engine_client: EngineClient, model_name: str) -> TargetKeeper | None:
    """Put a keeper between the routes and the engine if the operator named a target."""
    settings = Settings.from_environment()
    processor: Any = engine_client.renderer.get_mm_processor()
    if settings.target_ttft is None:
        return None
    path = os.environ.get(LOAD_FILE_VARIABLE)
    controller = Controller(
        SharedLoad(Path(path) if path else SharedLoad.create()),
        target=settings.target_ttft,
        floor=settings.min_retention or DEFAULT_FLOOR,
        ceiling=settings.default_retention,
    )
    keeper = TargetKeeper(controller, AdaptiveMetrics(model_name))
    keeper.watch(engine_client)
    processor.chooser = keeper
    return keeper


def _number(identity: str) -> int:
    return int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8])

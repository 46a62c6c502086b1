"""Questions to the workers, from any API server process."""

from __future__ import annotations

import asyncio
from typing import Any

from vllm.engine.protocol import EngineClient

_TIMEOUT_SECONDS = 30.0


async def ask_workers(
    engine_client: EngineClient,
    method: str,
    *args: object,
    timeout: float | None = _TIMEOUT_SECONDS,
) -> list[list[Any]]:
    """Call a method of all workers: one list per engine, in it one result per rank.

    `EngineClient.collective_rpc` would answer for the first data-parallel engine only.
    """
    engine_core = engine_client.engine_core  # type: ignore[attr-defined]
    answers: list[list[Any]] = await asyncio.wait_for(
        engine_core.call_utility_all_async("collective_rpc", method, None, args, None), timeout
    )
    return answers

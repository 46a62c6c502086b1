"""Requests as clients send them, and what became of each."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

import httpx

from benchmarks.shared.pictures import picture_url

CHAT = "/v1/chat/completions"
HUNG = "hung"
BROKEN = "connection lost"
REQUEST_SECONDS = 120.0
DELIBERATE = frozenset({503})


@dataclass(frozen=True, slots=True)
class Reply:
    """How a request ended: its status, or why there is none; and when."""

    status: int | str
    seconds: float
    body: str = ""
    retry_after: str | None = None

    @property
    def is_fault(self) -> bool:
        """Whether no client should see this: a 5xx that is not deliberate, a hang, a cut."""
        if isinstance(self.status, str):
            return True
        return self.status >= 500 and not (self.status in DELIBERATE and self.retry_after)


def image_part(number: int, size: tuple[int, int] = (96, 96)) -> dict[str, Any]:
    """Return picture `number` as a part of a message."""
    return {"type": "image_url", "image_url": {"url": picture_url(number, size)}}


def chat(model: str, images: Sequence[dict[str, Any]] = (), **fields: Any) -> dict[str, Any]:
    """Return a short greedy chat about some images."""
    content = [*images, {"type": "text", "text": "How many red circles are there?"}]
    message = {"role": "user", "content": content}
    body = {"model": model, "messages": [message], "temperature": 0, "max_tokens": 8}
    return {**body, **fields}


async def post(
    client: httpx.AsyncClient, body: Any, path: str = CHAT, seconds: float = REQUEST_SECONDS
) -> Reply:
    """Send one request and wait for its end, a stream's too, for a bounded time."""
    start = time.monotonic()
    content = {"content": body} if isinstance(body, bytes | str) else {"json": body}
    headers = {"Content-Type": "application/json"}
    try:
        async with asyncio.timeout(seconds):
            answer = await client.post(path, headers=headers, **content)
    except TimeoutError:
        return Reply(HUNG, time.monotonic() - start)
    except httpx.HTTPError as error:
        return Reply(BROKEN, time.monotonic() - start, repr(error))
    retry_after = answer.headers.get("Retry-After")
    return Reply(answer.status_code, time.monotonic() - start, answer.text, retry_after)


def client_of(url: str, connections: int = 64) -> httpx.AsyncClient:
    """Return a client without limits of its own."""
    limits = httpx.Limits(max_connections=connections)
    return httpx.AsyncClient(base_url=url, timeout=None, limits=limits)


async def many(
    send: Callable[[int], Awaitable[Reply]], num_requests: int, at_once: int
) -> list[Reply]:
    """Send requests, so many at a time."""
    gate = asyncio.Semaphore(at_once)

    async def one(number: int) -> Reply:
        async with gate:
            return await send(number)

    return list(await asyncio.gather(*map(one, range(num_requests))))


def statuses(replies: Sequence[Reply]) -> str:
    """Return the counts of statuses, as `200: 40, 503: 2`."""
    counts = Counter(reply.status for reply in replies)
    return ", ".join(f"{status}: {counts[status]}" for status in sorted(counts, key=str))


def p95(seconds: Sequence[float]) -> float:
    """Return the 95th percentile."""
    return quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]

"""Loads that a living server must bear: overload, departures, floods of images and of probes."""

import asyncio
import json
import time
from contextlib import suppress
from itertools import count
from statistics import median
from typing import Any

import httpx

from benchmarks.chaos.fuzzing import fuzz
from benchmarks.chaos.outcome import Outcome
from benchmarks.chaos.traffic import (
    CHAT,
    Reply,
    chat,
    client_of,
    image_part,
    many,
    p95,
    post,
    statuses,
)

TINY = (32, 32)
FLOOD_WAITS = 60
MAX_WAIT_RATIO = 1.5
_NUMBERS = count(10_000)


def new_images(number: int, size: tuple[int, int] = (96, 96)) -> list[dict[str, Any]]:
    """Return so many images that no request had before: nothing comes from a cache."""
    return [image_part(next(_NUMBERS), size) for _ in range(number)]


async def overload(url: str, model: str) -> Outcome:
    """Three times what the queue holds, then every refused request once more."""
    start = time.monotonic()
    images, long = new_images(96), {"max_tokens": 64, "ignore_eos": True}
    async with client_of(url, connections=256) as client:

        def body(number: int) -> dict[str, Any]:
            return chat(model, [images[number]], retention=0.111, **long)

        replies = await many(lambda number: post(client, body(number)), len(images), len(images))
        refused = [number for number, reply in enumerate(replies) if reply.status == 503]
        again = await many(lambda index: post(client, body(refused[index])), len(refused), 4)
    faults = [reply for reply in (*replies, *again) if reply.is_fault]
    survived = bool(refused) and not faults and {reply.status for reply in again} == {200}
    note = f"{statuses(replies)}; the refused again: {statuses(again)}"
    return Outcome("three times the queue", survived, time.monotonic() - start, note)


async def late_refusals(url: str, model: str) -> Outcome:
    """Requests refused after their image was rendered, each followed by a valid one with it."""
    start = time.monotonic()
    async with client_of(url) as client:
        refused, valid = [], []
        for number in range(40):
            images = new_images(1)
            wrong: dict[str, Any] = (
                {"logit_bias": {"999999": 1}}
                if number % 2
                else {"logprobs": True, "top_logprobs": 10_000}
            )
            refused.append(await post(client, chat(model, images, retention=0.111, **wrong)))
            valid.append(await post(client, chat(model, images, retention=0.111)))
    survived = {reply.status for reply in refused} == {400} and (
        {reply.status for reply in valid} == {200}
    )
    note = f"{statuses(refused)}; valid ones with the same image: {statuses(valid)}"
    return Outcome("late refusals", survived, time.monotonic() - start, note)


async def departures(url: str, model: str) -> Outcome:
    """Clients that leave before their answer; then the same images from clients that stay."""
    start = time.monotonic()
    images = new_images(50)

    async def leave(number: int) -> Reply:
        body = chat(model, [images[number % 50]], retention=0.111, max_tokens=256)
        async with client_of(url) as client:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.01 + 0.004 * (number % 60)):
                    await client.post(CHAT, json=body)
        return Reply("left", 0.0)

    await many(leave, 500, at_once=16)
    async with client_of(url) as client:

        def stay(number: int) -> Any:
            return post(client, chat(model, [images[number]], retention=0.111))

        replies = await many(stay, len(images), at_once=8)
    survived = {reply.status for reply in replies} == {200}
    note = f"500 left; afterwards {statuses(replies)}"
    return Outcome("clients that leave", survived, time.monotonic() - start, note)


async def waits_beside(
    url: str, model: str, num_images: int, min_waits: int = 1, **fields: Any
) -> tuple[list[float], list[Reply]]:
    """Seconds that small requests with an image wait beside a large request of tiny images.

    The large request is sent again, with other images, until so many small ones have waited.
    """
    waits: list[float] = []
    large: list[Reply] = []
    async with client_of(url) as client:
        while len(waits) < min_waits:
            body = json.dumps(chat(model, new_images(num_images, TINY), **fields)).encode()
            small = [chat(model, new_images(1), max_tokens=1) for _ in range(100)]
            sent = asyncio.create_task(post(client, body, seconds=600))
            await asyncio.sleep(0.02)
            for question in small:
                waits.append((await post(client, question, seconds=600)).seconds)
                if sent.done():
                    break
            large.append(await sent)
    return waits, large


async def image_flood(url: str, model: str, stock_url: str, num_unpruned: int) -> Outcome:
    """Requests of 400 tiny images at the lowest retention, others beside them.

    The others may wait at most 1.5 times as long as beside as many unpruned images as fit on
    stock vLLM.
    """
    start = time.monotonic()
    for server in (url, stock_url):
        await waits_beside(server, model, 1)
    waits, large = await waits_beside(url, model, 400, FLOOD_WAITS, retention=1e-9)
    stock_waits, stock_large = await waits_beside(stock_url, model, num_unpruned, FLOOD_WAITS)
    note = (
        f"400 images: {statuses(large)}, in {median(reply.seconds for reply in large):.1f} s; "
        f"others waited {median(waits):.2f} s, p95 {p95(waits):.2f} s ({len(waits)}); stock with "
        f"{num_unpruned}: {statuses(stock_large)}, in "
        f"{median(reply.seconds for reply in stock_large):.1f} s, others "
        f"{median(stock_waits):.2f} s, p95 {p95(stock_waits):.2f} s ({len(stock_waits)})"
    )
    survived = {reply.status for reply in (*large, *stock_large)} == {200}
    survived = survived and p95(waits) <= MAX_WAIT_RATIO * p95(stock_waits)
    return Outcome("400 images in a request", survived, time.monotonic() - start, note)


async def metrics_flood(url: str, model: str) -> Outcome:
    """Throughput with and without eight connections that read /metrics without a pause."""

    async def throughput(seconds: float) -> float:
        done, end = 0, time.monotonic() + seconds
        async with client_of(url) as client:

            async def ask() -> None:
                nonlocal done
                while time.monotonic() < end:
                    reply = await post(client, chat(model, [image_part(done % 7)], retention=0.111))
                    done += reply.status == 200

            await asyncio.gather(*(ask() for _ in range(8)))
        return done / seconds

    start = time.monotonic()
    await throughput(3)
    alone = await throughput(10)
    reading, reads = True, 0

    async def read() -> None:
        nonlocal reads
        async with httpx.AsyncClient(base_url=url, timeout=None) as client:
            while reading:
                await client.get("/metrics")
                reads += 1

    readers = [asyncio.create_task(read()) for _ in range(8)]
    beside = await throughput(10)
    reading = False
    await asyncio.gather(*readers)
    note = f"{alone:.1f} requests/s alone, {beside:.1f} beside {reads / 10:.0f} reads/s"
    # The readers and the requests share the cores of one machine: half is what is promised.
    return Outcome("/metrics flood", beside > alone / 2, time.monotonic() - start, note)


async def fuzzed(url: str, model: str, num_requests: int) -> Outcome:
    """Requests that are wrong in every way we know."""
    start = time.monotonic()
    replies = await fuzz(url, model, num_requests)
    faults = [(number, reply) for number, reply in enumerate(replies) if reply.is_fault]
    async with client_of(url) as client:
        after = await post(client, chat(model, [image_part(1)], retention=0.111))
    note = f"{len(replies)}: {statuses(replies)}; {len(faults)} faults" + (
        f", first: number {faults[0][0]}: {faults[0][1].status} {faults[0][1].body[:200]}"
        if faults
        else ""
    )
    seconds = time.monotonic() - start
    return Outcome("fuzzed requests", not faults and after.status == 200, seconds, note)


LOADS = {
    "overload": overload,
    "late-refusals": late_refusals,
    "departures": departures,
    "metrics-flood": metrics_flood,
}
"""Loads by name; all share one server."""

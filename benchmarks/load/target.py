"""Whether the server holds its target: one load, sent with a retention or left to the server."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TypeVar

from benchmarks.load.outcomes import Outcome
from benchmarks.shared.client import Client, ServerError
from benchmarks.shared.pictures import picture_url

_QUESTION = "What is in the picture?"
_OUTPUT_TOKENS = 4
_NUM_WARM_UP = 4
_MAX_WAITING = 256
_TARGETS_TO_RECOVER = 30
_SECONDS_BETWEEN_LOOKS = 1.0

Result = TypeVar("Result")


def measure_rate(client: Client, model: str, requests: int = 8) -> float:
    """Return how many unpruned requests a second the server answers when it always has some."""
    for number in range(_NUM_WARM_UP):
        client.ask(_body(model, -1 - number, 1.0))
    start = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        bodies = (_body(model, -100 - number, 1.0) for number in range(requests))
        list(pool.map(client.ask, bodies))
    return requests / (time.perf_counter() - start)


def send(
    client: Client, model: str, times: Sequence[float], retention: float | None, first: int
) -> list[Outcome]:
    """Send a request at each time, whether or not earlier ones are answered, and wait for all.

    Args:
        client: The server.
        model: What it serves.
        times: When requests go out, in seconds from now.
        retention: What all of them ask for; None leaves it to the server.
        first: Number of the first picture; none is ever sent twice.
    """
    start = time.perf_counter()

    def ask(place: int) -> Outcome:
        body = _body(model, first + place, retention)
        time.sleep(max(0.0, start + times[place] - time.perf_counter()))
        try:
            answer = client.ask(body)
        except ServerError:
            return Outcome(times[place], None, 1.0 if retention is None else retention)
        kept = (answer.visual_tokens or 0) / (answer.visual_tokens_total or 1)
        return Outcome(times[place], answer.ttft, kept)

    with ThreadPoolExecutor(min(len(times), _MAX_WAITING)) as pool:
        return list(pool.map(ask, range(len(times))))


def watch_recovery(
    client: Client, work: Callable[[], Result], overload_end: float
) -> tuple[Result, float | None]:
    """Do some work, and see how long after an overload the server is back at its ceiling.

    Args:
        client: The server.
        work: Sends the load.
        overload_end: Seconds after the start of the work.

    Returns:
        What the work returned, and the seconds; None if 30 targets were not enough.
    """
    start = time.perf_counter()
    is_sent = Event()

    def watch() -> float | None:
        back: float | None = None
        while True:
            adaptive = client.description()["adaptive"]
            after = time.perf_counter() - start - overload_end
            if after > 0 and adaptive["level"] >= adaptive["ceiling"]:
                back = after if back is None else back
            else:
                back = None
            is_late = after > _TARGETS_TO_RECOVER * adaptive["target_seconds"]
            if is_sent.is_set() and (back is not None or is_late):
                return back
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    with ThreadPoolExecutor(1) as pool:
        watched = pool.submit(watch)
        try:
            result = work()
        finally:
            is_sent.set()
        return result, watched.result()


def _body(model: str, number: int, retention: float | None) -> dict[str, object]:
    image = {"type": "image_url", "image_url": {"url": picture_url(number)}}
    content = [image, {"type": "text", "text": _QUESTION}]
    body: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": _OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        # Random weights write tokens that are no text: under load the next one is a step away.
        "return_token_ids": True,
    }
    return body if retention is None else {**body, "retention": retention}

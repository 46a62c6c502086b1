"""Rounds of all cases on the two servers, and the requests that they send."""

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

from benchmarks.serving.samples import PRUNING, STOCK, TEXT, Burst, Sample
from benchmarks.shared.client import Client
from benchmarks.shared.pictures import picture_url

QUESTION = "What is on the left of the red square?"

# A worker of vLLM looks for work without a pause until a second after it had some.
REST_SECONDS = 1.5

_numbers = count(1)  # of pictures and texts: none comes twice


class Server:
    """One of the two servers, as a client sees it."""

    def __init__(self, url: str) -> None:
        self.client = Client(url)
        self.model = self.client.models()[0]["id"]
        self.client.call_workers("start_encoder_clock")

    def body(self, max_tokens: int, **fields: Any) -> dict[str, Any]:
        """A request for exactly `max_tokens` tokens, each of which arrives by itself."""
        return {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }

    def question_body(
        self, max_tokens: int, url: str, question: str = QUESTION, **fields: Any
    ) -> dict[str, Any]:
        """A question about a picture."""
        content = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": question},
        ]
        return self.body(max_tokens, messages=[{"role": "user", "content": content}], **fields)

    def image_body(self, max_tokens: int, retention: float | None) -> dict[str, Any]:
        """A request about a picture that nobody asked about before."""
        body = self.question_body(max_tokens, picture_url(next(_numbers)))
        return body if retention is None else {**body, "retention": retention}

    def text_body(self, max_tokens: int, num_tokens: int) -> dict[str, Any]:
        """A request of exactly `num_tokens` tokens of text that nobody sent before."""
        chance = random.Random(next(_numbers))
        return self.body(max_tokens, prompt=[chance.randrange(10, 250) for _ in range(num_tokens)])

    def encoder_seconds(self) -> float:
        """Seconds that the vision encoder ran since the last call."""
        seconds: list[float] = self.client.call_workers("read_encoder_clock")
        return sum(seconds)

    def selection_seconds(self) -> float:
        """Seconds that choosing tokens took so far; a server of ours, whose page may be old."""
        counts: dict[str, float] = self.client.call_workers("msdg_statistics")
        return counts["seconds_sum"]

    def prompt_tokens(self) -> int:
        """Tokens of all prompts so far."""
        time.sleep(REST_SECONDS)  # our page of metrics is written once a second
        return int(self.client.metric("vllm:prompt_tokens_total") or 0)


def case_order(
    number: int, retentions: Sequence[float], texts: Sequence[tuple[str, float]] = ()
) -> list[tuple[str, float]]:
    """Return the cases of a round: one server after the other, stock vLLM first in odd rounds.

    Stock vLLM and retention 1.0, whose difference is the smallest, are always neighbours. In round
    0 the texts come last.
    """
    chance = random.Random(number)
    others = [(PRUNING, r) for r in retentions if r != 1.0]
    texts = chance.sample(texts, len(texts))
    order = [
        *texts,
        (STOCK, 1.0),
        (PRUNING, 1.0),
        *chance.sample(others, len(others)),
    ]
    return order if number % 2 else order[::-1]


class Benchmark:
    """All cases on two servers that are up."""

    def __init__(
        self, stock: Server, pruning: Server, retentions: Sequence[float], max_tokens: int
    ) -> None:
        self.stock = stock
        self.pruning = pruning
        self.retentions = retentions
        self.max_tokens = max_tokens
        self.samples: list[Sample] = []
        self.bursts: list[Burst] = []
        self._prompt_tokens: dict[float, int] = {}
        self._last_server: Server | None = None

    def _server(self, case: str) -> Server:
        """Return the server of a case, after the other one has come to rest."""
        server = self.pruning if case == PRUNING else self.stock
        if server is not self._last_server:
            time.sleep(REST_SECONDS)
            self._last_server = server
        return server

    def sample_round(self, number: int) -> Iterator[str]:
        """Send one request of every case, one after the other; yields after each."""
        # The first round tells how long the texts must be, so they come last in it.
        texts = [(TEXT, r) for r in self.retentions]
        for case, retention in case_order(number, self.retentions, texts):
            self.samples.append(self._sample(number, case, retention))
            yield f"{case} {retention:g}"

    def _sample(self, number: int, case: str, retention: float) -> Sample:
        server = self._server(case)
        if case == TEXT:
            body = server.text_body(self.max_tokens, self._prompt_tokens[retention])
        else:
            body = server.image_body(self.max_tokens, retention if case == PRUNING else None)
        before = server.selection_seconds() if case == PRUNING else 0.0
        server.encoder_seconds()
        answer = server.client.ask(body)
        selection = 0.0
        if case == PRUNING:
            self._prompt_tokens[retention] = answer.prompt_tokens
            selection = server.selection_seconds() - before
        return Sample(
            round=number,
            case=case,
            retention=retention,
            ttft=answer.ttft,
            latency=answer.latency,
            prompt_tokens=answer.prompt_tokens,
            encoder=server.encoder_seconds(),
            selection=selection,
        )

    def burst_round(self, number: int, concurrency: int, num_requests: int) -> Iterator[str]:
        """Saturate each server with every case, one after the other; yields after each."""
        for case, retention in case_order(number, self.retentions):
            self.bursts.append(self._burst(number, case, retention, concurrency, num_requests))
            yield f"{case} {retention:g} x {concurrency}"

    def _burst(
        self, number: int, case: str, retention: float, concurrency: int, num_requests: int
    ) -> Burst:
        server = self._server(case)
        wanted = retention if case == PRUNING else None
        bodies = [server.image_body(self.max_tokens, wanted) for _ in range(num_requests)]
        before = server.prompt_tokens()
        start = time.perf_counter()
        with ThreadPoolExecutor(concurrency) as pool:
            list(pool.map(server.client.ask, bodies))
        seconds = time.perf_counter() - start
        prompt_tokens = server.prompt_tokens() - before
        return Burst(number, case, retention, num_requests, seconds, prompt_tokens)

"""Prometheus metrics beside vLLM's; docs/metrics.md defines each."""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import os
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing
from itertools import accumulate
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from vllm.engine.protocol import EngineClient
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.buckets import TIME_TO_FIRST_TOKEN_BUCKETS
from vllm.v1.metrics.prometheus import get_prometheus_registry

from msdg_vllm.engine.api.visual_tokens import VisualTokens
from msdg_vllm.engine.hooks import wrap
from msdg_vllm.engine.worker.statistics import SECONDS_BUCKETS
from msdg_vllm.settings import Settings
from server.workers import ask_workers

logger = init_logger(f"vllm.{__name__}")

_RETENTION_BUCKETS = (0.05, 0.1, 0.15, 0.25, 0.35, 0.5, 0.75, 0.99, 1.0)
_SCRAPE_TIMEOUT_SECONDS = 2.0

REFRESH_SECONDS = 1.0
"""A page of /metrics is at most this old; nobody makes the workers be asked more often."""


class RequestMetrics:
    """What an API process counts itself; vLLM adds up the counters of several such processes."""

    def __init__(self, model_name: str) -> None:
        self._total = Counter(
            "msdg_visual_tokens",
            "Visual tokens of accepted requests before pruning.",
            ["model_name"],
        ).labels(model_name)
        self._kept = Counter(
            "msdg_visual_tokens_kept",
            "Visual tokens of accepted requests that the language model saw.",
            ["model_name"],
        ).labels(model_name)
        self._retention = Histogram(
            "msdg_request_retention_ratio",
            "Accepted requests with images by the fraction of visual tokens they kept.",
            ["model_name"],
            buckets=_RETENTION_BUCKETS,
        ).labels(model_name)
        images = Counter(
            "msdg_images",
            "Images and videos of accepted requests.",
            ["model_name", "pruned"],
        )
        self._images = {
            pruned: images.labels(model_name, str(pruned).lower()) for pruned in (True, False)
        }
        self._model_name = model_name
        self._first_token = Histogram(
            "msdg_time_to_first_token_seconds",
            "Time to first token of requests with images, by the fraction of tokens they kept.",
            ["model_name", "retention_le"],
            buckets=TIME_TO_FIRST_TOKEN_BUCKETS,
        )

    def count(self, tokens: VisualTokens) -> None:
        """Count one request; a request without images has nothing to count."""
        if not tokens.items:
            return
        self._total.inc(tokens.total)
        self._kept.inc(tokens.kept)
        self._retention.observe(tokens.kept / tokens.total)
        self._images[True].inc(tokens.pruned_items)
        self._images[False].inc(tokens.items - tokens.pruned_items)

    def observe_first_token(self, tokens: VisualTokens, seconds: float) -> None:
        """Add the time that a request with images waited for its first token."""
        bound = _RETENTION_BUCKETS[bisect_left(_RETENTION_BUCKETS, tokens.kept / tokens.total)]
        self._first_token.labels(self._model_name, str(bound)).observe(seconds)


def watch_first_tokens(engine_client: EngineClient, metrics: RequestMetrics) -> None:
    """Watch the outputs of every request with images that this API process sends to the engine.

    vLLM measures how long they wait but cannot know the retention; here both meet, for every route.
    """
    is_logged = Settings.from_environment().log_pruning

    def generate(stock: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = stock(prompt, *args, **kwargs)
        tokens = VisualTokens.of_input(prompt) if isinstance(prompt, Mapping) else VisualTokens()
        if not tokens.items:
            return outputs
        return _watched(outputs, tokens, metrics, is_logged and tokens.pruned_items > 0)

    wrap(engine_client, "generate", generate)


async def _watched(
    outputs: AsyncGenerator[RequestOutput, None],
    tokens: VisualTokens,
    metrics: RequestMetrics,
    is_logged: bool,
) -> AsyncGenerator[RequestOutput, None]:
    is_due = True
    async with aclosing(outputs):
        async for output in outputs:
            if is_due:
                is_due = False
                # There are no times under --disable-log-stats.
                seconds = None if output.metrics is None else output.metrics.first_token_latency
                if seconds is not None:
                    metrics.observe_first_token(tokens, seconds)
                if is_logged:
                    logger.info(
                        "%s kept %d of %d visual tokens of %d image%s by %s, "
                        "first token after %s s",
                        output.request_id,
                        tokens.kept,
                        tokens.total,
                        tokens.items,
                        "" if tokens.items == 1 else "s",
                        ", ".join(tokens.methods),
                        "?" if seconds is None else f"{seconds:.3f}",
                    )
            yield output


class WorkerMetrics(Collector):
    """What the workers count, asked at most once a second by all API processes together.

    Their totals are the same whichever API process answers, so they are no values of that
    process: those would be added up once per process.
    """

    def __init__(
        self, engine_client: EngineClient, model_name: str, shared_folder: str | None = None
    ) -> None:
        self._engine_client = engine_client
        self._model_name = model_name
        self._shared = None if shared_folder is None else SharedTotals(Path(shared_folder))
        self._totals: list[dict[str, Any]] = []

    async def refresh(self) -> None:
        """Ask the workers; when the engine is too busy to answer, the last totals stand."""
        if self._shared is None:
            self._totals = await self._ask() or self._totals
        elif self._shared.take_turn():
            if (totals := await self._ask()) is not None:
                self._shared.write(totals)
                self._totals = totals
        else:
            self._totals = self._shared.read() or self._totals

    async def _ask(self) -> list[dict[str, Any]] | None:
        try:
            answers = await ask_workers(
                self._engine_client, "msdg_statistics", timeout=_SCRAPE_TIMEOUT_SECONDS
            )
        except (TimeoutError, EngineDeadError) as error:
            logger.debug("The workers did not report their statistics: %r", error)
            return None
        # Tensor-parallel ranks do the same work: one of them speaks for the engine.
        return [
            max(ranks, key=lambda rank: int(rank["encoder_images"]))
            for answer in answers
            if (ranks := [rank for rank in answer if rank is not None])
        ]

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families, in Prometheus' terms."""
        for name, text in (
            ("encoder_runs", "Runs of the vision encoder on images to be pruned."),
            ("encoder_images", "Images to be pruned that the vision encoder ran on."),
            ("image_store_hits", "Images to be pruned that the image store had."),
            ("image_store_misses", "Images to be pruned that the image store had not."),
            ("image_store_evictions", "Images that made room in the image store."),
        ):
            counter = CounterMetricFamily(f"msdg_{name}", text, labels=["model_name"])
            counter.add_metric([self._model_name], sum(total[name] for total in self._totals))
            yield counter
        held = GaugeMetricFamily(
            "msdg_image_store_bytes", "Memory that images take in the store.", labels=["model_name"]
        )
        held.add_metric(
            [self._model_name], sum(total["image_store_bytes"] for total in self._totals)
        )
        yield held
        seconds = HistogramMetricFamily(
            "msdg_selection_seconds",
            "Time to analyse images that were encoded together and to select their tokens.",
            labels=["model_name"],
        )
        counts = [sum(column) for column in zip(*self._columns(), strict=True)]
        bounds = [*map(floatToGoString, SECONDS_BUCKETS), "+Inf"]
        seconds.add_metric(
            [self._model_name],
            list(zip(bounds, accumulate(counts), strict=True)),
            sum(total["seconds_sum"] for total in self._totals),
        )
        yield seconds

    def _columns(self) -> Iterable[list[int]]:
        return [[0] * (len(SECONDS_BUCKETS) + 1), *(t["seconds_buckets"] for t in self._totals)]


class SharedTotals:
    """The workers' totals in a file, for all API processes, and whose turn it is to ask."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "msdg_totals.json"
        self._turn = folder / "msdg_totals.turn"
        self._turn.touch()

    def take_turn(self) -> bool:
        """Whether nobody has asked for a second; if so, it is this process that asks."""
        with self._turn.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            now = time.time()
            if now - float(file.read() or 0) < REFRESH_SECONDS:
                return False
            file.seek(0)
            file.write(repr(now))
            file.truncate()
            return True

    def read(self) -> list[dict[str, Any]]:
        """Return the latest totals; none before the first answer."""
        try:
            totals: list[dict[str, Any]] = json.loads(self._file.read_text())
        except FileNotFoundError:
            return []
        return totals

    def write(self, totals: list[dict[str, Any]]) -> None:
        """Replace the totals at once, so that no reader sees half of them."""
        draft = self._file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(totals))
        draft.replace(self._file)


class MetricsPage:
    """The text of /metrics: all that vLLM shows there, and what the workers count.

    Anyone may read it, as often as they like: it is written at most once a second.
    """

    def __init__(self, engine_client: EngineClient, model_name: str) -> None:
        self._stock = get_prometheus_registry()
        self._workers = WorkerMetrics(
            engine_client, model_name, os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        )
        self._own = CollectorRegistry()
        self._own.register(self._workers)
        self._page = b""
        self._written = -math.inf
        self._writing = asyncio.Lock()

    async def render(self) -> bytes:
        """Return a page that is at most a second old."""
        async with self._writing:
            if time.monotonic() - self._written >= REFRESH_SECONDS:
                await self._workers.refresh()
                self._page = bytes(generate_latest(self._stock) + generate_latest(self._own))
                self._written = time.monotonic()
            return self._page

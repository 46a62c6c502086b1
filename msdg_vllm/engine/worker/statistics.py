"""What a worker counts about pruning: encoder runs, and the time that selecting tokens takes."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from msdg_vllm.engine.spec import PruningSpec

SECONDS_BUCKETS = (
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
)

_MAX_PENDING = 1024


@dataclass(slots=True)
class SelectionRun:
    """One selection, from all images of a batch.

    Attributes:
        specs: Of these images.
        encoded: Whether the encoder ran for them.
        seconds: What it took; None while the device has not passed the events around it.
        events: Those events; None when the time is known.
    """

    specs: frozenset[PruningSpec]
    encoded: bool
    seconds: float | None = None
    events: tuple[torch.Event, torch.Event] | None = field(default=None, compare=False)

    def settle(self) -> bool:
        """Say whether the time is known, without waiting for it."""
        if self.events is not None and self.events[1].query():
            first, last = self.events
            self.seconds, self.events = first.elapsed_time(last) / 1000, None
        return self.events is None


class PruningStatistics:
    """Counters that only grow, and a histogram of seconds; reading them waits for nothing."""

    def __init__(self, *, is_traced: bool = False) -> None:
        self.is_traced = is_traced
        self._runs: list[SelectionRun] = []
        self.encoder_runs = 0
        self.encoder_images = 0
        self._seconds_sum = 0.0
        self._bucket_counts = [0] * (len(SECONDS_BUCKETS) + 1)
        # Runs whose times are not known yet, oldest first.
        self._pending: deque[SelectionRun] = deque(maxlen=_MAX_PENDING)

    def count_encoder_run(self, num_images: int) -> None:
        """Count one run of the vision encoder on images that will be pruned."""
        self.encoder_runs += 1
        self.encoder_images += num_images

    @contextmanager
    def measure_selection(
        self, device: torch.device, specs: Iterable[PruningSpec], *, encoded: bool
    ) -> Iterator[None]:
        """Measure the work that is queued on `device` inside, without waiting for it."""
        run = SelectionRun(frozenset(specs), encoded)
        if device.type == "cpu":
            start = time.perf_counter()
            yield
            run.seconds = time.perf_counter() - start
        else:
            first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
            first.record()
            yield
            last.record()
            run.events = first, last
        if self.is_traced:
            self._runs.append(run)
        self._pending.append(run)
        self._collect()

    def take_runs(self) -> list[SelectionRun]:
        """Return the runs since the last call, if requests are traced."""
        runs, self._runs = self._runs, []
        return runs

    def snapshot(self) -> dict[str, Any]:
        """Return the counters as plain values that can cross processes."""
        self._collect()
        return {
            "encoder_runs": self.encoder_runs,
            "encoder_images": self.encoder_images,
            "seconds_sum": self._seconds_sum,
            "seconds_buckets": list(self._bucket_counts),
        }

    def _collect(self) -> None:
        """Take the times of the runs that the device has passed."""
        while self._pending and self._pending[0].settle():
            self._observe(self._pending.popleft().seconds or 0.0)

    def _observe(self, seconds: float) -> None:
        self._seconds_sum += seconds
        self._bucket_counts[bisect_left(SECONDS_BUCKETS, seconds)] += 1

"""What a worker counts about pruning: encoder runs, and the time that choosing tokens takes."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

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


class PruningStatistics:
    """Counters that only grow, and a histogram of seconds; reading them waits for nothing."""

    def __init__(self) -> None:
        self.encoder_runs = 0
        self.encoder_images = 0
        self._seconds_sum = 0.0
        self._bucket_counts = [0] * (len(SECONDS_BUCKETS) + 1)
        # Pairs of device events whose times are not known yet, oldest first.
        self._pending: deque[tuple[torch.Event, torch.Event]] = deque(maxlen=_MAX_PENDING)

    def count_encoder_run(self, num_images: int) -> None:
        """Count one run of the vision encoder on images that will be pruned."""
        self.encoder_runs += 1
        self.encoder_images += num_images

    @contextmanager
    def measure_selection(self, device: torch.device) -> Iterator[None]:
        """Measure the work that is queued on `device` inside, without waiting for it."""
        if device.type == "cpu":
            start = time.perf_counter()
            yield
            self._observe(time.perf_counter() - start)
            return
        first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        self._pending.append((first, last))
        self._collect()

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
        """Take the times of the events that the device has passed."""
        while self._pending and self._pending[0][1].query():
            first, last = self._pending.popleft()
            self._observe(first.elapsed_time(last) / 1000)

    def _observe(self, seconds: float) -> None:
        self._seconds_sum += seconds
        self._bucket_counts[bisect_left(SECONDS_BUCKETS, seconds)] += 1

"""The workers' counters."""

from __future__ import annotations

import torch

from msdg_vllm.engine.worker.statistics import SECONDS_BUCKETS, PruningStatistics


def test_runs_and_images_are_counted() -> None:
    statistics = PruningStatistics()
    statistics.count_encoder_run(3)
    statistics.count_encoder_run(1)
    snapshot = statistics.snapshot()
    assert (snapshot["encoder_runs"], snapshot["encoder_images"]) == (2, 4)


def test_each_measurement_falls_into_one_bucket() -> None:
    statistics = PruningStatistics()
    for seconds in (0.0, SECONDS_BUCKETS[0], SECONDS_BUCKETS[0] * 1.01, 100.0):
        statistics._observe(seconds)
    counts = statistics.snapshot()["seconds_buckets"]
    assert len(counts) == len(SECONDS_BUCKETS) + 1
    assert (counts[0], counts[1], counts[-1], sum(counts)) == (2, 1, 1, 4)


def test_measuring_on_the_cpu_takes_wall_clock_time() -> None:
    statistics = PruningStatistics()
    with statistics.measure_selection(torch.device("cpu")):
        pass
    snapshot = statistics.snapshot()
    assert sum(snapshot["seconds_buckets"]) == 1
    assert snapshot["seconds_sum"] > 0


class Event:
    """A device event that passes when told to."""

    passed = False

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, _: object) -> float:
        return 3.0


def test_events_of_a_device_are_read_only_when_they_have_passed() -> None:
    statistics = PruningStatistics()
    events = [(Event(), Event()) for _ in range(2)]
    statistics._pending.extend(events)  # type: ignore[arg-type]
    assert sum(statistics.snapshot()["seconds_buckets"]) == 0
    events[0][1].passed = True
    snapshot = statistics.snapshot()
    assert sum(snapshot["seconds_buckets"]) == 1
    assert snapshot["seconds_sum"] == 0.003

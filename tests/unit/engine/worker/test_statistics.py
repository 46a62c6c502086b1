"""The workers' counters."""

from __future__ import annotations

from typing import Any

import torch

from msdg_vllm.engine.spec import PruningSpec
from msdg_vllm.engine.worker.statistics import SECONDS_BUCKETS, PruningStatistics, SelectionRun
from tests.unit.engine.events import Event

SPEC = PruningSpec(budget=1, num_tokens=2)


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
    with statistics.measure_selection(torch.device("cpu"), [SPEC], encoded=True):
        pass
    snapshot = statistics.snapshot()
    assert sum(snapshot["seconds_buckets"]) == 1
    assert snapshot["seconds_sum"] > 0


def test_events_of_a_device_are_read_only_when_they_have_passed() -> None:
    statistics = PruningStatistics()
    events: list[Any] = [(Event(), Event()) for _ in range(2)]
    statistics._pending.extend(SelectionRun(frozenset(), True, events=pair) for pair in events)
    assert sum(statistics.snapshot()["seconds_buckets"]) == 0
    events[0][1].passed = True
    snapshot = statistics.snapshot()
    assert sum(snapshot["seconds_buckets"]) == 1
    assert snapshot["seconds_sum"] == 0.25


def test_runs_are_handed_over_once_and_only_if_requests_are_traced() -> None:
    for is_traced in (True, False):
        statistics = PruningStatistics(is_traced=is_traced)
        with statistics.measure_selection(torch.device("cpu"), [SPEC], encoded=False):
            pass
        runs = statistics.take_runs()
        assert [(run.specs, run.encoded) for run in runs] == [
            (frozenset([SPEC]), False)
        ] * is_traced
        assert all(run.seconds for run in runs)
        assert statistics.take_runs() == []

"""Loads with a shape, and what holding a target does to them on a queue."""

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.load import target
from benchmarks.load.outcomes import Outcome, plot, share_within, table
from benchmarks.load.shapes import SHAPES, arrival_times, overload_end
from benchmarks.load.simulation import COSTS, simulate
from benchmarks.load.target import watch_recovery


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_fills_the_time_it_is_given(shape: str) -> None:
    assert sum(share for _, share in SHAPES[shape]) == pytest.approx(1)
    times = arrival_times(shape, rate=20, seconds=100)
    assert times == sorted(times)
    assert 90 < times[-1] < 100
    expected = sum(load * share for load, share in SHAPES[shape]) * 20 * 100
    assert len(times) == pytest.approx(expected, rel=0.15)
    assert times == arrival_times(shape, rate=20, seconds=100)


@pytest.mark.parametrize("shape", ["step", "bursts"])
def test_auto_holds_what_all_tokens_miss_and_keeps_more_than_the_floor(shape: str) -> None:
    costs = COSTS["gpu"]
    times = arrival_times(shape, 1 / costs.seconds(1.0), 120)
    full, floor, auto = (
        simulate(costs, times, target=1.0, floor=0.111, retention=retention)
        for retention in (1.0, 0.111, None)
    )
    assert share_within(full, 1.0) < 0.2
    assert share_within(floor, 1.0) > 0.99
    assert share_within(auto, 1.0) > 0.95
    assert sum(one.retention for one in auto) / len(auto) > 0.25


def test_an_overload_ends_with_the_last_phase_above_one() -> None:
    assert overload_end("step", 90) == pytest.approx(60)
    assert overload_end("steady", 90) is None


def test_recovery_is_counted_from_the_end_of_the_overload_to_a_level_that_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Server:
        """Its level is back for a moment, and from the fourth look on."""

        levels = iter([1.0, 0.5, 1.0, 0.5])

        def description(self) -> Any:
            level = next(self.levels, 1.0)
            return {"adaptive": {"level": level, "ceiling": 1.0, "target_seconds": 1.0}}

    monkeypatch.setattr(target, "_SECONDS_BETWEEN_LOOKS", 0.2)
    server: Any = Server()
    _, seconds = watch_recovery(server, lambda: time.sleep(0.7), 0.1)
    assert seconds == pytest.approx(0.7, abs=0.09)


def test_outcomes_are_told_and_drawn(tmp_path: Path) -> None:
    results = {"auto": [Outcome(0.0, 0.5, 1.0), Outcome(1.0, 1.5, 0.5), Outcome(2.0, None, 0.5)]}
    row = table(results, 1.0).splitlines()[-1]
    assert row == "| auto | 3 | 33.3% | 0.50 s | 1.50 s | 0.67 | 0.80 |"
    plot(results, 1.0, "a title", tmp_path / "plot.svg")
    assert "</svg>" in (tmp_path / "plot.svg").read_text()

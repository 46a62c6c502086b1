"""What a worker says with the output of a step, on a device that is slower than the host."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
)

from msdg_vllm.engine import tracing
from msdg_vllm.engine.spec import PruningSpec
from msdg_vllm.engine.worker.statistics import PruningStatistics, SelectionRun
from tests.unit.engine.events import Event

SPEC = PruningSpec(budget=1, num_tokens=2)


class Pending(AsyncModelRunnerOutput):
    """The output of a step that the device is still at."""

    def __init__(self, event: Event) -> None:
        self.event = event

    def get_output(self) -> ModelRunnerOutput:
        self.event.passed = True
        return EMPTY_MODEL_RUNNER_OUTPUT


@pytest.fixture
def worker() -> Any:
    statistics = PruningStatistics(is_traced=True)
    return SimpleNamespace(get_model=lambda: SimpleNamespace(statistics=statistics))


def test_an_output_that_is_there_takes_the_runs_of_its_step_along(worker: Any) -> None:
    statistics = worker.get_model().statistics
    statistics._runs.append(SelectionRun(frozenset([SPEC]), True, 0.25))
    assert tracing._run_and_say(lambda self: None, worker) is None  # `sample_tokens` comes next
    output = tracing._run_and_say(lambda self: EMPTY_MODEL_RUNNER_OUTPUT, worker)
    assert output.msdg_runs == [SelectionRun(frozenset([SPEC]), True, 0.25)]
    assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, "msdg_runs")
    assert tracing._run_and_say(lambda self: output, worker) is output


def test_an_output_to_come_takes_only_its_own_and_knows_their_times(worker: Any) -> None:
    statistics = worker.get_model().statistics
    event: Any = Event()
    statistics._runs.append(SelectionRun(frozenset([SPEC]), False, events=(event, event)))
    pending = tracing._run_and_say(lambda self: Pending(event), worker)
    statistics._runs.append(SelectionRun(frozenset(), True, 1.0))  # the next step has begun
    crossed = pickle.loads(pickle.dumps(pending.get_output()))
    assert crossed.msdg_runs == [SelectionRun(frozenset([SPEC]), False, 0.25)]

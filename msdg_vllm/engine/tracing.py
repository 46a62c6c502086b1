"""What workers did about the images of a traced request, on its way to the request's span.

Fills a gap: vLLM makes a span of what the API process knows. Workers give what they did to the
output of their step, the scheduler to the trace headers of the requests that it was done for, and
those return with the requests' outputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.request import Request

from msdg_vllm.engine.hooks import wrap
from msdg_vllm.engine.spec import PruningSpec, row_of

if TYPE_CHECKING:
    from msdg_vllm.engine.worker.statistics import SelectionRun

_RUNS = "msdg_runs"  # on the output of a step
_ENCODED, _SECONDS = "msdg-encoded", "msdg-selection-seconds"
_WORKERS = "vllm.v1.worker.gpu_worker"


def attributes_in(headers: Mapping[str, str]) -> dict[str, bool | float]:
    """Return the attributes of a span that the trace headers of a request name.

    What selection took is that of all batches that images of the request were in: it waited for
    the whole of each.
    """
    return {
        "msdg.encoder_ran": _ENCODED in headers,
        "msdg.selection_seconds": float(headers.get(_SECONDS, 0.0)),
    }


def install_in_worker() -> None:
    """Have the workers of this process say what they did; again changes nothing."""
    if (module := sys.modules.get(_WORKERS)) is not None:
        for name in ("execute_model", "sample_tokens"):
            wrap(module.Worker, name, _run_and_say)


def install_in_scheduler() -> None:
    """Have the scheduler tell requests what was done for them; again changes nothing."""
    wrap(Scheduler, "update_from_output", _tell_and_update)


def _run_and_say(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    output = stock(self, *args, **kwargs)
    # `execute_model` has an output only where `sample_tokens` is not called for one.
    statistics = getattr(self.get_model(), "statistics", None) if output is not None else None
    if statistics is None or not (runs := statistics.take_runs()):
        return output
    if not isinstance(output, AsyncModelRunnerOutput):
        return _with_runs(output, runs)
    finish = output.get_output
    # When it is there the device has passed the step, and its times are known.
    output.get_output = lambda: _with_runs(finish(), runs)  # type: ignore[method-assign]
    return output


def _with_runs(output: Any, runs: Iterable[SelectionRun]) -> Any:
    for one in runs:
        one.settle()
    output = copy(output)  # the output of an empty step is shared
    setattr(output, _RUNS, [replace(one, events=None) for one in runs])  # events cannot cross
    return output


def _tell_and_update(
    stock: Callable[..., Any], self: Scheduler, scheduler_output: Any, output: Any
) -> Any:
    if self.vllm_config.observability_config.otlp_traces_endpoint is not None:
        runs = getattr(output, _RUNS, ())
        for request_id, indices in scheduler_output.scheduled_encoder_inputs.items():
            if (request := self.requests.get(request_id)) is not None:
                _tell(request, indices, runs)
    return stock(self, scheduler_output, output)


def _tell(request: Request, indices: Iterable[int], runs: Iterable[SelectionRun]) -> None:
    rows = [row_of(request.mm_features[index]) for index in indices]
    specs = [None if row is None else PruningSpec.from_tensor(row) for row in rows]
    own = [run for run in runs if not run.specs.isdisjoint(specs)]
    headers = dict(request.trace_headers or {})
    # What is not pruned has no other way.
    if any(run.encoded for run in own) or not all(spec and spec.budget for spec in specs):
        headers[_ENCODED] = ""
    seconds = sum(run.seconds or 0.0 for run in own)
    headers[_SECONDS] = str(float(headers.get(_SECONDS, 0.0)) + seconds)
    request.trace_headers = headers

"""What a step of the encoder costs, by vLLM's own scheduler."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

import msdg_vllm
from msdg_vllm.engine.spec import UNPRUNED, PruningSpec, field_name
from msdg_vllm.engine.tracing import attributes_in
from msdg_vllm.engine.worker.statistics import SelectionRun
from tests.checkpoints import make_llava

NUM_TOKENS = 576
IMAGES_PER_STEP = 2048 // NUM_TOKENS
PRUNED = PruningSpec(budget=1, num_tokens=NUM_TOKENS)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    msdg_vllm.register()
    checkpoint: Path = make_llava(tmp_path_factory.mktemp("llava"))
    return EngineArgs(
        model=str(checkpoint),
        dtype="float32",
        max_model_len=2048,
        max_num_batched_tokens=2048,
        max_num_seqs=64,
        enforce_eager=True,
        block_size=32,
        async_scheduling=False,
        enable_prefix_caching=False,
    ).create_engine_config()


@pytest.fixture
def scheduler(config: VllmConfig) -> Scheduler:
    attention = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=16, dtype=torch.float32)
    config.cache_config.num_gpu_blocks = 2048
    groups = [KVCacheGroupSpec(["layer"], attention)]
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(2048, [], groups),
        structured_output_manager=Mock(),
        block_size=32,
    )


def request_of(
    num_images: int, spec: PruningSpec = PRUNED, name: str | None = None, *, around: int = 0
) -> Request:
    """A prompt of images alone, each of other content, with some text on both sides."""
    is_embed = torch.ones((spec.budget or NUM_TOKENS) + 2 * around, dtype=torch.bool)
    is_embed[:around] = is_embed[len(is_embed) - around :] = False
    length = len(is_embed)
    field = MultiModalFieldElem(data=spec.to_tensor(), field=MultiModalBatchedField())
    features = [
        MultiModalFeatureSpec(
            data=MultiModalKwargsItem({field_name("image"): field}),
            modality="image",
            identifier=f"{next(_numbers)}",
            mm_position=PlaceholderRange(
                offset=index * length, length=length, is_embed=is_embed if around else None
            ),
        )
        for index in range(num_images)
    ]
    return Request(
        request_id=name or f"request-{next(_numbers)}",
        prompt_token_ids=[5] * (num_images * length + 1),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=features,
    )


def steps_of(scheduler: Scheduler, *runs: SelectionRun) -> Iterator[SchedulerOutput]:
    """Step until nothing is left; every request ends with one token."""
    for _ in range(1000):
        output = scheduler.schedule()
        yield output
        ids = list(output.num_scheduled_tokens)
        done = [
            [7]
            if scheduler.requests[id_].num_computed_tokens >= scheduler.requests[id_].num_tokens
            else []
            for id_ in ids
        ]
        made: Any = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={id_: index for index, id_ in enumerate(ids)},
            sampled_token_ids=done,
        )
        made.msdg_runs = runs
        scheduler.update_from_output(output, made)
        if not scheduler.has_unfinished_requests():
            return
    raise AssertionError("the scheduler makes no progress")


def images_of(output: SchedulerOutput) -> dict[str, int]:
    return {id_: len(items) for id_, items in output.scheduled_encoder_inputs.items()}


def test_a_step_takes_as_many_pruned_images_as_unpruned_ones(scheduler: Scheduler) -> None:
    scheduler.add_request(request_of(20, PRUNED, "many"))
    per_step = [images_of(output).get("many", 0) for output in steps_of(scheduler)]
    assert max(per_step) == IMAGES_PER_STEP
    assert sum(per_step) == 20


def test_unpruned_images_are_scheduled_as_vllm_does(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(scheduler: Scheduler) -> list[list[int]]:
        for name in ("a", "b", "c"):
            scheduler.add_request(request_of(3, UNPRUNED, name))
        return [
            [*output.num_scheduled_tokens.values(), *images_of(output).values()]
            for output in steps_of(scheduler)
        ]

    ours = plan(scheduler)
    charging: Callable[..., object] = Scheduler._try_schedule_encoder_inputs
    monkeypatch.setattr(Scheduler, "_try_schedule_encoder_inputs", charging.__wrapped__)  # type: ignore[attr-defined]
    assert plan(scheduler) == ours


def test_small_requests_together_cost_what_one_large_one_costs(scheduler: Scheduler) -> None:
    for _ in range(20):
        scheduler.add_request(request_of(1))
    per_step = [sum(images_of(output).values()) for output in steps_of(scheduler)]
    assert max(per_step) == IMAGES_PER_STEP
    assert sum(per_step) == 20


@pytest.mark.parametrize("spec", [PRUNED, UNPRUNED])
def test_others_get_their_turn_beside_a_request_of_many_images(
    scheduler: Scheduler, spec: PruningSpec
) -> None:
    scheduler.add_request(request_of(100, PRUNED, "many"))
    steps = steps_of(scheduler)
    for _ in range(5):
        next(steps)
    for name in ("b", "c"):
        scheduler.add_request(request_of(1, spec, name))
    waited = dict.fromkeys(("b", "c"), 0)
    for number, output in enumerate(steps, 1):
        waited |= {name: number for name in waited if name in images_of(output)}
    assert set(waited.values()) == {1}


def test_a_request_of_many_images_is_not_starved_by_the_others(scheduler: Scheduler) -> None:
    scheduler.add_request(request_of(10, PRUNED, "many"))
    steps = steps_of(scheduler)
    num_steps = 0
    while "many" in scheduler.requests:
        next(steps)
        num_steps += 1
        for _ in range(3):
            scheduler.add_request(request_of(1))
    assert num_steps < 30


def test_an_image_larger_than_a_step_is_encoded_by_itself(scheduler: Scheduler) -> None:
    scheduler.add_request(request_of(3, PruningSpec(budget=1, num_tokens=5000), "large"))
    per_step = [images_of(output).get("large", 0) for output in steps_of(scheduler)]
    assert [count for count in per_step if count] == [1, 1, 1]


def test_an_image_that_is_encoded_already_costs_nothing(scheduler: Scheduler) -> None:
    first = request_of(IMAGES_PER_STEP, PRUNED, "first")
    scheduler.add_request(first)
    list(steps_of(scheduler))
    second = request_of(IMAGES_PER_STEP, PRUNED, "second")
    again = request_of(IMAGES_PER_STEP, PRUNED, "again")
    for feature, known in zip(again.mm_features, first.mm_features, strict=True):
        feature.identifier = known.identifier
    scheduler.add_request(again)
    scheduler.add_request(second)
    output = next(steps_of(scheduler))
    assert images_of(output) == {"second": IMAGES_PER_STEP}
    assert "again" in output.num_scheduled_tokens


@pytest.mark.parametrize(
    ("spec", "runs", "encoded", "seconds"),
    [
        (PRUNED, [(PRUNED, True, 0.25)], True, 0.25),
        (PRUNED, [(PRUNED, False, 0.25), (PRUNED, False, 0.5)], False, 0.75),
        (PRUNED, [(replace(PRUNED, budget=2), True, 0.25)], False, 0.0),
        (UNPRUNED, [], True, 0.0),
    ],
    ids=["encoded", "known", "another's", "unpruned"],
)
def test_a_traced_request_is_told_what_was_done_for_it(
    scheduler: Scheduler,
    spec: PruningSpec,
    runs: list[tuple[PruningSpec, bool, float]],
    encoded: bool,
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracing = scheduler.vllm_config.observability_config
    monkeypatch.setattr(tracing, "otlp_traces_endpoint", "http://127.0.0.1:9")
    request = request_of(1, spec)
    request.trace_headers = {"traceparent": "its own"}
    scheduler.add_request(request)
    made = [SelectionRun(frozenset([one]), was_encoded, took) for one, was_encoded, took in runs]
    list(steps_of(scheduler, *made))
    assert request.trace_headers["traceparent"] == "its own"
    assert attributes_in(request.trace_headers) == {
        "msdg.encoder_ran": encoded,
        "msdg.selection_seconds": seconds,
    }


def test_a_request_that_is_not_traced_is_told_nothing(scheduler: Scheduler) -> None:
    request = request_of(1)
    scheduler.add_request(request)
    list(steps_of(scheduler, SelectionRun(frozenset([PRUNED]), True, 0.25)))
    assert request.trace_headers is None


@pytest.mark.parametrize("start", [0, 5, 6, 7, 8])
def test_the_text_behind_an_image_costs_nothing(scheduler: Scheduler, start: int) -> None:
    """A prefix hit may end there: the first image is not encoded, and the second must be."""
    limit = scheduler.max_num_encoder_input_tokens
    request = request_of(2, PruningSpec(budget=4, num_tokens=limit), around=2)
    items, num_tokens, left, *_ = scheduler._try_schedule_encoder_inputs(
        request, start, 16 - start, limit
    )
    in_first = start < 6
    assert items == [0 if in_first else 1]
    assert num_tokens == (8 if in_first else 16) - start
    assert left == 0

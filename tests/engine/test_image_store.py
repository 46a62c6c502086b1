"""Encode once, ask many: answers from the store equal those of an engine that knows nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from msdg_vllm.methods import METHODS
from tests.checkpoints import make_llava
from tests.engine.generation import Request, generate, generate_one_by_one, running_engine
from tests.engine.probes import resize_store, store_counts
from tests.engine.second_question import assert_encoded_once, forget, images_encoded
from tests.engine.test_llava import QUESTIONS, ask
from tests.pictures import SIZES, picture_of

FIRST, SECOND = QUESTIONS
THIRD = "What is left of the sign?"
# Tokens of the miniature in float32, and what msdg finds out about them.
IMAGE_BYTES = 576 * (64 * 4 + 25)
WAYS = ((0.05, "msdg"), (0.111, "msdg"), (0.05, "cdpruner"), (0.05, "dart0"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    with running_engine(folder, max_num_batched_tokens=2048) as engine:
        yield engine


@pytest.fixture(autouse=True)
def roomy(llm: Any) -> None:
    llm.apply_model(partial(resize_store, max_bytes=2**28))
    forget(llm)


@pytest.mark.parametrize("method", ["msdg", "cdpruner", "dart0", "divprune", "random"])
def test_a_second_question_needs_no_encoder(llm: Any, method: str) -> None:
    picture = picture_of("square", 3)
    seconds = [
        ask(SECOND, picture, retention=0.05, method=method),
        ask(THIRD, picture, retention=0.333, method=method),
        ask(SECOND, picture, retention=0.111, method=method, query_mode="none"),
    ]
    assert_encoded_once(llm, ask(FIRST, picture, retention=0.111, method=method), seconds)


def test_methods_that_read_more_are_encoded_again(llm: Any) -> None:
    picture = picture_of("square", 4)
    generate(llm, [ask(FIRST, picture, retention=0.05)])
    before = images_encoded(llm)
    generate(llm, [ask(FIRST, picture, retention=0.05, method="visionzip")])
    assert images_encoded(llm) == before + 1


def test_retention_1_neither_fills_nor_reads_the_store(llm: Any) -> None:
    picture = picture_of("square", 5)
    generate(llm, [ask(FIRST, picture), ask(SECOND, picture, retention=1.0)])
    (counts,) = llm.apply_model(store_counts)
    assert not any(counts.values())


def test_hits_misses_duplicates_and_unpruned_images_share_a_step(llm: Any) -> None:
    known, new, other = (picture_of("wide", seed) for seed in (6, 7, 8))
    mixed = [
        ask(SECOND, known, new, retention=0.111),
        ask(THIRD, new, known, retention=0.05),
        ask(FIRST, other),
        ask(SECOND, new, other, retention=0.222, method="cdpruner"),
    ]
    cold = [answer for request in mixed for answer in _cold(llm, request)]
    forget(llm)
    generate(llm, [ask(FIRST, known, retention=0.111)])
    before = images_encoded(llm)
    answers = generate(llm, mixed)
    # `new` and `other`, at most once each for every method that must find something out.
    assert images_encoded(llm) - before <= 3
    for answer, expected in zip(answers, cold, strict=True):
        assert answer.token_ids == expected.token_ids


def _cold(llm: Any, request: Request) -> list[Any]:
    forget(llm)
    return generate_one_by_one(llm, [request])


def test_500_mixed_requests_through_a_store_that_evicts_all_the_time(llm: Any) -> None:
    generator = random.Random(0)
    pictures = [picture_of(kind, seed) for seed in range(3) for kind in SIZES]
    kinds = [
        ask(question, picture, retention=retention, method=method)
        for picture in pictures
        for question in (FIRST, SECOND, THIRD)
        for retention, method in (
            (0.05, "msdg"),
            (0.111, "msdg"),
            (0.05, "cdpruner"),
            (0.05, "dart0"),
        )
    ] + [ask(FIRST, picture) for picture in pictures]
    chosen = [generator.randrange(len(kinds)) for _ in range(500)]
    cold = {}
    for number in sorted(set(chosen)):
        ((answer),) = _cold(llm, kinds[number])
        cold[number] = answer
    # Two images and a half.
    llm.apply_model(partial(resize_store, max_bytes=IMAGE_BYTES * 5 // 2))
    forget(llm)
    for start in range(0, 500, 50):
        # vLLM's own caches would answer most of them.
        llm.reset_prefix_cache()
        part = chosen[start : start + 50]
        for number, answer in zip(part, generate(llm, [kinds[n] for n in part]), strict=True):
            assert answer.token_ids == cold[number].token_ids
    (counts,) = llm.apply_model(store_counts)
    assert counts["image_store_hits"] > 20
    assert counts["image_store_evictions"] > 50
    assert counts["image_store_bytes"] <= IMAGE_BYTES * 5 // 2


def test_another_salt_shares_nothing(llm: Any) -> None:
    picture = picture_of("square", 9)

    def salted(question: str, salt: str) -> Request:
        return {**ask(question, picture, retention=0.05), "cache_salt": salt}

    generate(llm, [salted(FIRST, "one")])
    for request in (salted(FIRST, "two"), ask(FIRST, picture, retention=0.05)):
        before = images_encoded(llm)
        generate(llm, [request])
        assert images_encoded(llm) == before + 1
    before = images_encoded(llm)
    generate(llm, [salted(SECOND, "one"), salted(SECOND, "two")])
    assert images_encoded(llm) == before


@pytest.mark.parametrize("reset", ["encoder", "mm", "weights", "sleep"])
def test_resets_forget_images(llm: Any, reset: str) -> None:
    picture = picture_of("square", 10)
    generate(llm, [ask(FIRST, picture, retention=0.05)])
    if reset == "encoder":
        llm.llm_engine.reset_encoder_cache()
    elif reset == "mm":
        llm.reset_mm_cache()
    elif reset == "weights":
        llm.collective_rpc("reload_weights")
    else:
        llm.sleep(level=1)
        llm.wake_up()
    before = images_encoded(llm)
    generate(llm, [ask(SECOND, picture, retention=0.05)])
    assert images_encoded(llm) == before + 1


def test_explanations_say_whether_the_encoder_ran(llm: Any) -> None:
    from msdg_vllm.request import PruningRequest
    from tests.engine.probes import explained

    picture = picture_of("square", 11)
    tiles = []
    for question in (FIRST, SECOND):
        request = PruningRequest.parse(0.111, {"explain": True})
        generate(llm, [{**ask(question, picture), "mm_processor_kwargs": {"pruning": request}}])
        ((tile,),) = llm.apply_model(partial(explained, key=request.explanation))
        tiles.append(tile)
    assert [tile["encoded"] for tile in tiles] == [True, False]
    first, second = tiles
    assert first["all_groups"] == second["all_groups"]
    assert first["sinks"] == second["sinks"]
    assert first["picture"] == second["picture"]
    assert first["kept"] != second["kept"]


def test_every_method_is_asked_about(llm: Any) -> None:
    """A step with all methods about one image encodes it once."""
    picture = picture_of("square", 12)
    methods = [name for name in METHODS if "resize" not in name]  # for free resolutions only
    requests = [ask(FIRST, picture, retention=0.05, method=method) for method in methods]
    cold = [_cold(llm, request)[0].token_ids for request in requests]
    forget(llm)
    assert [answer.token_ids for answer in generate(llm, requests)] == cold


def test_two_tensor_parallel_ranks_keep_the_same_images(
    llm: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(3)
    pictures = [picture_of("square", seed) for seed in range(5)]
    kinds = [
        ask(question, picture, retention=0.05, method=method)
        for picture in pictures
        for question in (FIRST, SECOND, THIRD)
        for method in ("msdg", "cdpruner")
    ]
    chosen = [generator.randrange(len(kinds)) for _ in range(60)]
    expected = generate(llm, [kinds[number] for number in chosen])
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with running_engine(folder, tensor_parallel_size=2, max_num_batched_tokens=2048) as parallel:
        parallel.apply_model(partial(resize_store, max_bytes=IMAGE_BYTES * 5 // 2))
        answers = generate(parallel, [kinds[number] for number in chosen])
        first, second = parallel.apply_model(store_counts)
    assert first == second
    assert first["image_store_hits"] > 5
    assert first["image_store_evictions"] > 5
    assert [answer.token_ids for answer in answers] == [one.token_ids for one in expected]

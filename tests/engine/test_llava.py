"""LLaVA-1.5 on the real engine, against Hugging Face and against itself under other schedules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from msdg_vllm.calibration.loading import load_tower
from msdg_vllm.core.errors import RequestError
from msdg_vllm.methods import METHODS
from msdg_vllm.request import PruningRequest
from tests.checkpoints import make_llava
from tests.engine.generation import (
    Generated,
    Request,
    assert_same,
    generate,
    generate_one_by_one,
    generated,
    image_hashes,
    processor_kwargs,
    running_engine,
    stock_answers,
)
from tests.engine.llava_oracle import LlavaOracle
from tests.engine.method_oracle import REFERENCED
from tests.engine.probes import kept_tokens, tower_batches, watch_tower
from tests.engine.qwen_probes import record_states, take_states
from tests.pictures import SIZES, picture_of

NUM_TOKENS = 576
BUDGETS = {0.05: 29, 0.111: 64, 0.222: 128, 0.333: 192, 0.9: 518}
# A picture, and budgets, with which no method has a decision that is too close to call: after a
# few tokens the miniature's narrow embeddings leave CDPruner nothing to tell tokens apart by.
METHOD_SEED = 2
FITTING = [name for name in METHODS if "resize" not in name]
METHOD_BUDGETS = {
    name: (0.01, 6) if name in {"cdpruner", "cen_cdpruner"} else (0.05, 29) for name in FITTING
}
QUESTIONS = ("Is there a blue circle in the picture?", "Read the code on the sign.")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> LlavaOracle:
    return LlavaOracle(folder)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    with running_engine(folder, max_num_batched_tokens=2048) as engine:
        yield engine


def ask(question: str, *images: Any, **kwargs: Any) -> Request:
    """A user turn with images and a question, in the checkpoint's chat format."""
    return {
        "prompt": prompt_of(question, len(images)),
        "multi_modal_data": {"image": list(images)},
        "mm_processor_kwargs": processor_kwargs(kwargs),
    }


def prompt_of(question: str, num_images: int = 1) -> str:
    return "USER: " + "<image>\n" * num_images + f"{question} ASSISTANT:"


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("retention", BUDGETS)
def test_pruned_answer_equals_hugging_face(
    llm: Any, oracle: LlavaOracle, retention: float, question: str
) -> None:
    pictures = [picture_of(kind, seed) for seed, kind in enumerate(SIZES)]
    answers = generate(llm, [ask(question, p, retention=retention) for p in pictures])
    for picture, answer in zip(pictures, answers, strict=True):
        expected = oracle.generate(prompt_of(question), [(picture, question, BUDGETS[retention])])
        assert_same(answer, expected)


@pytest.mark.parametrize("kind", ["wide", "square"])
def test_calibration_sees_the_states_that_the_server_captures(
    llm: Any, folder: Path, kind: str
) -> None:
    picture = picture_of(kind, 22)
    llm.apply_model(record_states)
    generate(llm, [ask(QUESTIONS[0], picture, retention=0.05, method="evocut")], max_tokens=1)
    ((states,),) = llm.apply_model(take_states)
    encoded = load_tower(str(folder)).encode(picture)
    assert encoded.valid.all()
    for layer, state in states.items():
        assert (torch.from_numpy(state) - encoded.states[layer]).abs().max() < 1e-4


@pytest.fixture(scope="module")
def answers_by_method(llm: Any) -> dict[str, Generated]:
    """One picture and one question to all methods, in one mixed batch."""
    picture = picture_of("square", METHOD_SEED)
    requests = [
        ask(QUESTIONS[0], picture, retention=retention, method=name)
        for name, (retention, _) in METHOD_BUDGETS.items()
    ]
    return dict(zip(FITTING, generate(llm, requests), strict=True))


@pytest.mark.parametrize("method", REFERENCED)
def test_every_method_equals_its_reference_on_hugging_face_states(
    answers_by_method: dict[str, Generated], oracle: LlavaOracle, method: str
) -> None:
    picture = picture_of("square", METHOD_SEED)
    _, budget = METHOD_BUDGETS[method]
    expected = oracle.generate(prompt_of(QUESTIONS[0]), [(picture, QUESTIONS[0], budget, method)])
    assert_same(answers_by_method[method], expected)


def test_every_method_has_a_reference() -> None:
    assert set(REFERENCED) == set(FITTING) - {"msdg", "random"}


@pytest.mark.parametrize("method", ["resize", "resize+msdg"])
def test_a_tower_of_one_size_refuses_to_scale_images_and_names_pooling(
    llm: Any, method: str
) -> None:
    request = ask(QUESTIONS[0], picture_of("square", 1), retention=0.222, method=method)
    with pytest.raises(RequestError, match=r"images at any size.*try 'pool'.*methods that can are"):
        generate(llm, [request])


def test_methods_share_no_cache_entry_and_questions_only_where_they_do_not_matter(
    llm: Any,
) -> None:
    picture = picture_of("tall", 3)

    def identity(method: str, question: str) -> str:
        request = ask(question, picture, retention=0.05, method=method)
        return image_hashes(llm, request)["image"][0]

    assert len({identity(method, QUESTIONS[0]) for method in FITTING}) == len(FITTING)
    for method in FITTING:
        shared = identity(method, QUESTIONS[0]) == identity(method, QUESTIONS[1])
        assert shared == (method not in {"msdg", "cdpruner", "cen_cdpruner", "dart0"}), method


def test_random_tokens_depend_on_the_picture_and_not_on_the_batch(llm: Any) -> None:
    pictures = [picture_of("square", seed) for seed in (31, 32)]

    def kept(requests: list[Request], keys: tuple[int, ...]) -> list[list[int]]:
        forget(llm)
        generate(llm, requests, max_tokens=1)
        return [llm.apply_model(partial(kept_tokens, key=key))[0] for key in keys]

    first, second = (
        ask(
            QUESTIONS[0],
            picture,
            pruning=PruningRequest(retention=0.111, method="random", explanation=key),
        )
        for key, picture in enumerate(pictures, start=1001)
    )
    (alone,) = kept([first], (1001,))
    again, other = kept([second, *mixed_requests()[:2], first], (1001, 1002))
    assert len(alone) == 64
    assert again == alone != other


def test_several_images_with_one_question_equal_hugging_face(llm: Any, oracle: LlavaOracle) -> None:
    pictures = [picture_of("wide", 1), picture_of("tall", 2), picture_of("square", 3)]
    question = QUESTIONS[0]
    (answer,) = generate(llm, [ask(question, *pictures, retention=0.222)])
    expected = oracle.generate(
        prompt_of(question, 3), [(picture, question, 128) for picture in pictures]
    )
    assert_same(answer, expected)


def test_a_count_is_the_same_as_the_fraction_that_gives_it(llm: Any) -> None:
    picture = picture_of("wide", 1)
    same = [
        ask(QUESTIONS[0], picture, retention=0.111),
        ask(QUESTIONS[0], picture, max_visual_tokens=64),
        ask(QUESTIONS[0], picture, retention=0.5, max_visual_tokens=64),
        ask(QUESTIONS[0], picture, retention=0.111, max_visual_tokens=500),
    ]
    by_fraction, *by_count = generate_one_by_one(llm, same)
    assert by_count == [by_fraction] * 3
    assert len({tuple(image_hashes(llm, request)["image"]) for request in same}) == 1
    whole = ask(QUESTIONS[0], picture, max_visual_tokens=NUM_TOKENS)
    assert image_hashes(llm, whole) == image_hashes(llm, ask(QUESTIONS[0], picture))


def test_given_query_replaces_the_question(llm: Any, oracle: LlavaOracle) -> None:
    picture = picture_of("square", 5)
    (answer,) = generate(llm, [ask(QUESTIONS[0], picture, retention=0.111, query="green stars")])
    assert_same(answer, oracle.generate(prompt_of(QUESTIONS[0]), [(picture, "green stars", 64)]))


def test_query_mode_none_ignores_the_question(llm: Any, oracle: LlavaOracle) -> None:
    picture = picture_of("square", 6)
    (answer,) = generate(llm, [ask(QUESTIONS[0], picture, retention=0.111, query_mode="none")])
    assert_same(answer, oracle.generate(prompt_of(QUESTIONS[0]), [(picture, "", 64)]))


def test_chat_takes_each_query_from_the_turn_of_its_image(llm: Any, oracle: LlavaOracle) -> None:
    from vllm import SamplingParams

    first, second = picture_of("wide", 7), picture_of("tall", 8)
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "A chat."}]},
        {
            "role": "user",
            "content": [
                {"type": "image_pil", "image_pil": first},
                {"type": "text", "text": QUESTIONS[0]},
            ],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "yes"}]},
        {
            "role": "user",
            "content": [
                {"type": "image_pil", "image_pil": second, "retention": 0.222},
                {"type": "text", "text": QUESTIONS[1]},
            ],
        },
    ]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=5, ignore_eos=True)
    (output,) = llm.chat(messages, params, mm_processor_kwargs={"retention": 0.111}, use_tqdm=False)
    prompt = (
        f"A chat. USER: <image>\n{QUESTIONS[0]} ASSISTANT: yes "
        f"USER: <image>\n{QUESTIONS[1]} ASSISTANT:"
    )
    expected = oracle.generate(prompt, [(first, QUESTIONS[0], 64), (second, QUESTIONS[1], 128)])
    assert_same(generated(output), expected)


@pytest.mark.parametrize(("retention", "kept"), [(0.333, 192), (0.222, 128), (0.111, 64)])
def test_prompt_shrinks_by_exactly_the_pruned_tokens(llm: Any, retention: float, kept: int) -> None:
    picture = picture_of("square")
    whole, pruned = generate(
        llm, [ask(QUESTIONS[0], picture), ask(QUESTIONS[0], picture, retention=retention)]
    )
    removed = len(whole.prompt_token_ids) - len(pruned.prompt_token_ids)
    assert removed == NUM_TOKENS - kept


def mixed_requests() -> list[Request]:
    """Requests of every kind, for one step."""
    text_only: Request = {"prompt": "USER: The quick brown fox ASSISTANT:"}
    square, wide = picture_of("square", 1), picture_of("wide", 2)
    return [
        ask(QUESTIONS[0], square, retention=0.111),
        ask(QUESTIONS[1], square, retention=0.111),
        ask(QUESTIONS[0], square, retention=0.333),
        text_only,
        ask(QUESTIONS[0], square),
        ask(QUESTIONS[1], square, wide, retention=0.05),
        ask(QUESTIONS[1], wide, retention=0.9),
        # Two that read attention, of all heads, and one of them merges.
        ask(QUESTIONS[0], square, retention=0.111, method="visionzip"),
        ask(QUESTIONS[0], wide, retention=0.111, method="hiprune"),
    ]


def test_mixed_batch_equals_the_requests_one_by_one(llm: Any) -> None:
    together = generate(llm, mixed_requests())
    forget(llm)
    for request, answer in zip(mixed_requests(), together, strict=True):
        (alone,) = generate(llm, [request])
        assert_same(alone, answer)


def test_other_schedules_give_the_same_answers(llm: Any, folder: Path) -> None:
    expected = generate(llm, mixed_requests())
    # A token budget far below one image cuts every image into several chunks, and a cache of a
    # few blocks is evicted over and over.
    with running_engine(
        folder,
        max_num_batched_tokens=48,
        max_num_seqs=3,
        enable_prefix_caching=False,
        num_gpu_blocks_override=24,
    ) as chunked:
        for _ in range(2):
            for answer, other in zip(generate(chunked, mixed_requests()), expected, strict=True):
                assert_same(other, answer)


def test_repeated_after_eviction_gives_the_same_answer(llm: Any) -> None:
    request = ask(QUESTIONS[0], picture_of("huge", 4), retention=0.222)
    (first,) = generate(llm, [request])
    forget(llm)
    (second,) = generate(llm, [request])
    assert_same(second, first)


def forget(llm: Any) -> None:
    """Empty every cache of the engine."""
    assert llm.reset_prefix_cache()
    llm.reset_mm_cache()
    llm.llm_engine.engine_core.reset_encoder_cache()


def test_same_request_again_does_not_run_the_encoder(llm: Any) -> None:
    request = ask(QUESTIONS[0], picture_of("tall", 11), retention=0.111)
    llm.apply_model(watch_tower)
    (first,) = generate(llm, [request])
    assert llm.apply_model(tower_batches) == [[1]]
    (second,) = generate(llm, [request])
    assert llm.apply_model(tower_batches) == [[1]]
    assert_same(second, first)


@pytest.mark.parametrize("change", [{"query": "fox"}, {"retention": 0.222}])
def test_other_query_or_budget_is_never_served_from_the_cache(
    llm: Any, oracle: LlavaOracle, change: dict[str, Any]
) -> None:
    picture = picture_of("tall", 12)
    generate(llm, [ask(QUESTIONS[0], picture, retention=0.111)])
    wishes = {"retention": 0.111, "query": QUESTIONS[0], **change}
    (answer,) = generate(llm, [ask(QUESTIONS[0], picture, **wishes)])
    budget = BUDGETS[wishes["retention"]]
    expected = oracle.generate(prompt_of(QUESTIONS[0]), [(picture, wishes["query"], budget)])
    assert_same(answer, expected)


def test_tower_batches_stay_within_what_was_profiled(llm: Any) -> None:
    pictures = [picture_of("square", seed) for seed in range(100, 112)]
    llm.apply_model(watch_tower)
    generate(llm, [ask(QUESTIONS[0], picture, retention=0.05) for picture in pictures])
    (batches,) = llm.apply_model(tower_batches)
    assert sum(batches) == len(pictures)
    assert max(batches) <= 2048 // NUM_TOKENS


def test_prompt_that_fits_only_when_pruned_is_served(llm: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    pictures = [picture_of("square", 1), picture_of("wide", 2)]
    with pytest.raises(VLLMValidationError, match="maximum model length of 1024"):
        generate(llm, [ask(QUESTIONS[0], *pictures)])
    (answer,) = generate(llm, [ask(QUESTIONS[0], *pictures, retention=0.333)])
    assert len(answer.prompt_token_ids) < 1024
    with pytest.raises(VLLMValidationError, match="maximum model length of 1024"):
        generate(llm, [ask(QUESTIONS[0], *pictures, retention=0.95)])


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"retention": 0}, r"retention must be in \(0, 1\], got 0;"),
        ({"retention": -0.1}, r"retention must be in \(0, 1\], got -0.1;"),
        ({"retention": 1.5}, r"retention must be in \(0, 1\], got 1.5;"),
        ({"retention": math.nan}, r"retention must be in \(0, 1\], got nan;"),
        ({"retention": "0.5"}, r"retention must be in \(0, 1\], got '0.5';"),
        ({"retention": True}, r"retention must be in \(0, 1\], got True;"),
        (
            {"retention": 0.5, "method": "guess"},
            "method must be one of 'msdg', 'random'.*, got 'guess'",
        ),
        ({"retention": 0.5, "query_mode": "all"}, "query_mode must be one of .*, got 'all'"),
        ({"retention": 0.5, "query": 7}, "query must be a string, got 7"),
    ],
)
def test_bad_wishes_are_refused_and_the_engine_serves_on(
    llm: Any, wishes: dict[str, Any], words: str
) -> None:
    picture = picture_of("square", 1)
    with pytest.raises(ValueError, match=words):
        generate(llm, [ask(QUESTIONS[0], picture, **wishes)])
    (answer,) = generate(llm, [ask(QUESTIONS[0], picture, retention=0.111)])
    assert len(answer.token_ids) == 6


def test_unpruned_is_stock_vllm_to_the_bit(llm: Any, folder: Path) -> None:
    pictures = [picture_of(kind, seed) for seed, kind in enumerate(SIZES)]
    plain = [ask(QUESTIONS[0], picture) for picture in pictures]
    expected, hashes = stock_answers(folder, plain, max_num_batched_tokens=2048)
    forget(llm)
    unpruned: tuple[dict[str, Any], ...] = (
        {},
        {"retention": 1.0},
        {"retention": 1, "query": "fox", "method": "visionzip"},
    )
    for wishes in unpruned:
        requests = [ask(QUESTIONS[0], picture, **wishes) for picture in pictures]
        assert [image_hashes(llm, request) for request in requests] == hashes
        assert generate_one_by_one(llm, requests) == expected
        forget(llm)


def test_two_tensor_parallel_ranks_equal_one(
    llm: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(llm, mixed_requests())
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with running_engine(folder, tensor_parallel_size=2, max_num_batched_tokens=2048) as parallel:
        for answer, other in zip(generate(parallel, mixed_requests()), expected, strict=True):
            assert_same(answer, other)

"""GLM-4.1V on the real engine: the mixins of Qwen's models carry its images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from msdg_vllm.core.errors import RequestError
from tests.engine.generation import (
    Generated,
    Request,
    assert_same,
    generate,
    image_hashes,
    processor_kwargs,
    running_engine,
    stock_answers,
)
from tests.engine.method_oracle import REFERENCED
from tests.engine.qwen_family import BLOCK_SIZE, ERRORS
from tests.engine.qwen_oracle import Medium, QwenOracle
from tests.engine.qwen_probes import encoder_graph_modalities
from tests.engine.qwen_requests import QUESTIONS, forget, make_video, video_metadata
from tests.engine.second_question import assert_encoded_once
from tests.glm_checkpoint import make_glm4v
from tests.pictures import SIZES, picture_of

QUESTION = QUESTIONS[0]
REFUSED = ("cls_attention",)  # its tower has no class token
OPTIONS = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 40,
    "block_size": BLOCK_SIZE,
    "enable_prefix_caching": True,
    "limit_mm_per_prompt": {"image": 4, "video": 1},
}


def prompt_of(num_images: int) -> str:
    images = "<|begin_of_image|><|image|><|end_of_image|>" * num_images
    return f"<|user|>\n{images}{QUESTION}<|assistant|>\n"


def ask(*pictures: Any, **wishes: Any) -> Request:
    """A question about images; the query is named, so that no template has to be read."""
    if wishes:
        wishes.setdefault("query", QUESTION)
    return {
        "prompt": prompt_of(len(pictures)),
        "multi_modal_data": {"image": list(pictures)},
        "mm_processor_kwargs": processor_kwargs(wishes),
    }


def expected(oracle: QwenOracle, pictures: list[Any], **wishes: Any) -> Generated:
    media = [Medium(picture, QUESTION, **wishes) for picture in pictures]
    return oracle.generate(prompt_of(len(pictures)), media)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_glm4v(tmp_path_factory.mktemp("glm4v"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> QwenOracle:
    return QwenOracle(folder)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    with running_engine(folder, **OPTIONS) as engine:
        yield engine


@pytest.mark.parametrize("retention", [0.05, 0.4])
def test_pruned_images_equal_hugging_face(llm: Any, oracle: QwenOracle, retention: float) -> None:
    pictures = [picture_of(kind, seed) for seed, kind in enumerate(SIZES)]
    requests = [[picture] for picture in pictures] + [pictures[1:3]]
    answers = generate(llm, [ask(*own, retention=retention) for own in requests])
    for own, answer in zip(requests, answers, strict=True):
        assert_same(answer, expected(oracle, own, retention=retention))


def test_every_method_equals_its_reference(llm: Any, oracle: QwenOracle) -> None:
    picture, methods = picture_of("wide", 4), [name for name in REFERENCED if name not in REFUSED]
    answers = generate(llm, [ask(picture, retention=0.1, method=name) for name in methods])
    for method, answer in zip(methods, answers, strict=True):
        assert_same(answer, expected(oracle, [picture], retention=0.1, method=method))


def test_comparison_notices_an_error_of_one(llm: Any, oracle: QwenOracle) -> None:
    picture = picture_of("wide", 1)
    media = [Medium(picture, QUESTION, 0.4)]
    (answer,) = generate(llm, [ask(picture, retention=0.4)])
    assert_same(answer, oracle.generate(prompt_of(1), media))
    for error in ERRORS:
        with pytest.raises(AssertionError):
            assert_same(answer, oracle.generate(prompt_of(1), media, **error))


def test_prefix_hit_that_ends_inside_an_image_is_exact(llm: Any, oracle: QwenOracle) -> None:
    picture = picture_of("wide", 32)
    request = ask(picture, retention=0.45)
    forget(llm)
    (first,) = generate(llm, [request])
    pad = oracle.model.config.image_token_id
    spots = [n for n, token in enumerate(first.prompt_token_ids) if token == pad]
    assert spots[0] < (len(first.prompt_token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE <= spots[-1]
    llm.llm_engine.engine_core.reset_encoder_cache()
    (second,) = generate(llm, [request])
    answer = expected(oracle, [picture], retention=0.45)
    assert_same(first, answer)
    assert_same(second, answer)


def test_mixed_batch_equals_its_requests_one_by_one(llm: Any) -> None:
    pictures = [picture_of(kind, 40) for kind in ("wide", "tall", "tiny")]
    requests = [
        *(ask(picture, retention=0.6) for picture in pictures),
        *(ask(picture, retention=0.1, method="divprune") for picture in pictures),
        ask(pictures[0]),
        ask(*pictures[:2], retention=0.3),
        {"prompt": "<|user|>\nRead<|assistant|>\n"},
    ]
    forget(llm)
    together = generate(llm, requests)
    forget(llm)
    for request, answer in zip(requests, together, strict=True):
        (alone,) = generate(llm, [request])
        assert_same(alone, answer)


def ask_about_video(**wishes: Any) -> Request:
    video = make_video(4, 3)
    return {
        "prompt": f"<|user|>\n<|begin_of_video|><|video|><|end_of_video|>{QUESTION}<|assistant|>\n",
        "multi_modal_data": {"video": [(video, video_metadata(video))]},
        "mm_processor_kwargs": wishes,
    }


def test_a_video_is_refused_when_it_should_be_pruned(llm: Any) -> None:
    with pytest.raises(RequestError, match=r"retention 0\.2 cannot be applied to video 0"):
        generate(llm, [ask_about_video(retention=0.2)])


def test_encoder_cuda_graphs_stay_off(llm: Any) -> None:
    assert llm.apply_model(encoder_graph_modalities) == [[]]


def test_unpruned_is_stock_vllm_to_the_bit(llm: Any, folder: Path) -> None:
    pictures = [picture_of(kind, 50) for kind in SIZES]
    plain = [*map(ask, pictures), ask_about_video()]
    answers, hashes = stock_answers(folder, plain, **{**OPTIONS, "max_num_seqs": 1})
    forget(llm)
    requests = [*(ask(picture, retention=1.0) for picture in pictures), ask_about_video()]
    assert [image_hashes(llm, request) for request in requests] == hashes
    assert [generate(llm, [request])[0] for request in requests] == answers


def test_a_second_question_needs_no_encoder(llm: Any) -> None:
    pictures = [picture_of("wide", 21), picture_of("tall", 22)]
    seconds = [
        ask(*pictures[::-1], retention=0.4, query=QUESTIONS[1]),
        ask(pictures[1], retention=0.1, method="divprune"),
    ]
    assert_encoded_once(llm, ask(*pictures, retention=0.05), seconds)

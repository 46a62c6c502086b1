"""InternVL on the real engine: tiles and a thumbnail, a class token, pixel shuffle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msdg_vllm.core.errors import RequestError
from tests.engine.generation import (
    Request,
    assert_same,
    generate,
    image_hashes,
    processor_kwargs,
    running_engine,
    stock_answers,
)
from tests.engine.internvl_oracle import InternVLOracle
from tests.engine.method_oracle import REFERENCED
from tests.engine.qwen_requests import forget
from tests.engine.second_question import assert_encoded_once
from tests.internvl_checkpoint import TOKENS_PER_TILE, make_internvl
from tests.pictures import SIZES, picture_of

QUESTION = "Is there a blue circle in the picture?"
BLOCK_SIZE = 32
OPTIONS = {
    "max_model_len": 1024,
    # Cuts every image into chunks, and blocks end inside images.
    "max_num_batched_tokens": 40,
    "block_size": BLOCK_SIZE,
    "enable_prefix_caching": True,
    "limit_mm_per_prompt": {"image": 4, "video": 1},
}


def prompt_of(num_images: int) -> str:
    return f"<s>user\n{'<IMG_CONTEXT>' * num_images}\n{QUESTION}</s>assistant\n"


def ask(*pictures: Any, **wishes: Any) -> Request:
    """A question about images; the query is named, so that no template has to be read."""
    if wishes:
        wishes["query"] = QUESTION
    return {
        "prompt": prompt_of(len(pictures)),
        "multi_modal_data": {"image": list(pictures)},
        "mm_processor_kwargs": processor_kwargs(wishes),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_internvl(tmp_path_factory.mktemp("internvl"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> InternVLOracle:
    return InternVLOracle(folder)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    with running_engine(folder, **OPTIONS) as engine:
        yield engine


@pytest.mark.parametrize("retention", [0.05, 0.4])
def test_pruned_images_equal_hugging_face(
    llm: Any, oracle: InternVLOracle, retention: float
) -> None:
    pictures = [picture_of(kind, seed) for seed, kind in enumerate(SIZES)]
    requests = [[picture] for picture in pictures] + [pictures[1:3]]
    answers = generate(llm, [ask(*images, retention=retention) for images in requests])
    for images, answer in zip(requests, answers, strict=True):
        assert_same(answer, oracle.generate(prompt_of(len(images)), images, QUESTION, retention))


def test_every_method_equals_its_reference(llm: Any, oracle: InternVLOracle) -> None:
    picture = picture_of("wide", 4)
    answers = generate(llm, [ask(picture, retention=0.2, method=name) for name in REFERENCED])
    for method, answer in zip(REFERENCED, answers, strict=True):
        assert_same(answer, oracle.generate(prompt_of(1), [picture], QUESTION, 0.2, method))


def test_comparison_notices_tokens_of_another_order(
    llm: Any, oracle: InternVLOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = picture_of("wide", 1)
    (answer,) = generate(llm, [ask(picture, retention=0.2)])
    expected = oracle.generate(prompt_of(1), [picture], QUESTION, 0.2)
    assert_same(answer, expected)
    tiles = oracle.tiles(picture)
    monkeypatch.setattr(oracle, "tiles", lambda _: tiles.flip(0))
    swapped = oracle.generate(prompt_of(1), [picture], QUESTION, 0.2)
    with pytest.raises(AssertionError):
        assert_same(answer, swapped)


def test_prefix_hit_that_ends_inside_an_image_is_exact(llm: Any, oracle: InternVLOracle) -> None:
    picture = picture_of("wide", 32)
    request = ask(picture, retention=0.45)
    forget(llm)
    (first,) = generate(llm, [request])
    pad = oracle.processor.image_token_id
    spots = [n for n, token in enumerate(first.prompt_token_ids) if token == pad]
    assert len(spots) == len(oracle.tiles(picture)) * int(TOKENS_PER_TILE * 0.45 + 0.5)
    assert spots[0] < (len(first.prompt_token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE <= spots[-1]
    llm.llm_engine.engine_core.reset_encoder_cache()
    (second,) = generate(llm, [request])
    expected = oracle.generate(prompt_of(1), [picture], QUESTION, 0.45)
    assert_same(first, expected)
    assert_same(second, expected)


def test_mixed_batch_equals_its_requests_one_by_one(llm: Any) -> None:
    pictures = [picture_of(kind, 40) for kind in ("wide", "tall", "tiny")]
    requests = [
        *(ask(picture, retention=0.6) for picture in pictures),
        *(ask(picture, retention=0.1, method="divprune") for picture in pictures),
        ask(pictures[0]),
        ask(*pictures[:2], retention=0.3, scope="image"),
        {"prompt": "<s>user\nRead</s>assistant\n"},
    ]
    forget(llm)
    together = generate(llm, requests)
    forget(llm)
    for request, answer in zip(requests, together, strict=True):
        (alone,) = generate(llm, [request])
        assert_same(alone, answer)


def ask_about_video(**wishes: Any) -> Request:
    video = np.stack([np.asarray(picture_of("square", seed)) for seed in range(2)])
    return {
        "prompt": f"<s>user\n<video>\n{QUESTION}</s>assistant\n",
        "multi_modal_data": {"video": [video]},
        "mm_processor_kwargs": wishes,
    }


def test_a_video_is_refused_when_it_should_be_pruned(llm: Any) -> None:
    with pytest.raises(RequestError, match=r"retention 0\.2 cannot be applied to video 0.*image"):
        generate(llm, [ask_about_video(retention=0.2)])


def test_unpruned_is_stock_vllm_to_the_bit(llm: Any, folder: Path) -> None:
    pictures = [picture_of(kind, 50) for kind in SIZES]
    plain = [*map(ask, pictures), ask_about_video()]
    expected, hashes = stock_answers(folder, plain, **{**OPTIONS, "max_num_seqs": 1})
    forget(llm)
    requests = [*(ask(picture, retention=1.0) for picture in pictures), ask_about_video()]
    assert [image_hashes(llm, request) for request in requests] == hashes
    assert [generate(llm, [request])[0] for request in requests] == expected


def test_a_second_question_needs_no_encoder(llm: Any) -> None:
    pictures = [picture_of("wide", 21), picture_of("tall", 22)]
    seconds = [ask(*pictures[::-1], retention=0.4), ask(pictures[1], retention=0.1)]
    assert_encoded_once(llm, ask(*pictures, retention=0.05), seconds)

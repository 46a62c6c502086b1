"""LLaVA-NeXT on the real engine: tiles, padding and both scopes, against Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.generation import (
    Request,
    assert_same,
    generate,
    generate_one_by_one,
    image_hashes,
    processor_kwargs,
    running_engine,
    stock_answers,
)
from tests.engine.llava_next_oracle import LlavaNextOracle
from tests.engine.probes import tower_batches, watch_tower
from tests.engine.second_question import assert_encoded_once
from tests.llava_next_checkpoint import make_llava_next
from tests.pictures import make_picture

OPTIONS = {"max_model_len": 4096, "max_num_batched_tokens": 8192}
QUESTIONS = ("Is there a blue circle in the picture?", "Read the code on the sign.")
# Width and height.
SHAPES = {
    "one tile": (336, 336),
    "1x2": (672, 336),
    "2x1": (300, 600),
    "1x3": (1008, 336),
    "3x1": (330, 1008),
    "2x2": (700, 700),
    "photo": (640, 480),
    "strip": (1000, 30),
    "line": (2000, 1),
    "tiny": (3, 2),
}


def picture(shape: str, seed: int = 0) -> Any:
    return make_picture(*SHAPES[shape], seed=seed)


def prompt_of(question: str, num_images: int = 1) -> str:
    return "USER: " + "<image>\n" * num_images + f"{question} ASSISTANT:"


def ask(question: str, *images: Any, **kwargs: Any) -> Request:
    return {
        "prompt": prompt_of(question, len(images)),
        "multi_modal_data": {"image": list(images)},
        "mm_processor_kwargs": processor_kwargs(kwargs),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llava_next(tmp_path_factory.mktemp("llava_next"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> LlavaNextOracle:
    return LlavaNextOracle(folder)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    with running_engine(folder, **OPTIONS) as engine:
        yield engine


@pytest.mark.parametrize(
    ("retention", "shape", "shares", "seed"),
    [
        (0.056, "photo", [32, 32, 32, 32, 32], 0),
        (0.111, "2x2", [64, 64, 64, 64, 64], 0),
        (0.222, "1x2", [128, 128, 128], 0),
        (0.111, "one tile", [64, 64], 0),
        (0.056, "2x1", [32, 32, 32], 1),
        (0.056, "3x1", [32, 32, 32, 32], 0),
        (0.111, "1x3", [64, 64, 64, 64], 0),
        # What a tile of padding cannot use goes to the tile with most tokens left.
        (0.111, "strip", [112, 48, 48, 48], 0),
        (0.111, "line", [128, 0], 0),
        (0.02, "tiny", [12, 12], 0),
    ],
)
def test_pruned_answer_equals_hugging_face(
    llm: Any,
    oracle: LlavaNextOracle,
    retention: float,
    shape: str,
    shares: list[int],
    seed: int,
) -> None:
    image = picture(shape, seed)
    (answer,) = generate(llm, [ask(QUESTIONS[0], image, retention=retention)])
    assert_same(answer, oracle.generate(prompt_of(QUESTIONS[0]), [(image, QUESTIONS[0], shares)]))


def test_a_count_is_shared_among_the_tiles_of_an_image(llm: Any, oracle: LlavaNextOracle) -> None:
    for shape, count, shares in (("photo", 100, [20] * 5), ("2x2", 3, [1, 1, 1, 0, 0])):
        image = picture(shape)
        (answer,) = generate(llm, [ask(QUESTIONS[0], image, max_visual_tokens=count)])
        expected = oracle.generate(prompt_of(QUESTIONS[0]), [(image, QUESTIONS[0], shares)])
        assert_same(answer, expected)


@pytest.mark.parametrize(("shape", "budget", "seed"), [("photo", 160, 0), ("strip", 128, 0)])
def test_scope_image_is_one_run_over_all_tiles(
    llm: Any, oracle: LlavaNextOracle, shape: str, budget: int, seed: int
) -> None:
    image = picture(shape, seed)
    (answer,) = generate(llm, [ask(QUESTIONS[1], image, retention=0.056, scope="image")])
    assert_same(answer, oracle.generate(prompt_of(QUESTIONS[1]), [(image, QUESTIONS[1], budget)]))


def test_several_images_with_tiles_of_their_own_equal_hugging_face(
    llm: Any, oracle: LlavaNextOracle
) -> None:
    images = [picture("one tile", 0), picture("strip", 0)]
    (answer,) = generate(llm, [ask(QUESTIONS[0], *images, retention=0.056)])
    shares = [[32] * 2, [32] * 4]
    expected = oracle.generate(
        prompt_of(QUESTIONS[0], 2),
        [(image, QUESTIONS[0], share) for image, share in zip(images, shares, strict=True)],
    )
    assert_same(answer, expected)


@pytest.mark.parametrize(("retention", "budget"), [(0.056, 160), (0.111, 320), (0.222, 640)])
@pytest.mark.parametrize("scope", ["tile", "image"])
def test_the_budgets_of_the_paper_hold_for_five_tiles(
    llm: Any, retention: float, budget: int, scope: str
) -> None:
    text = len(
        generate(llm, [{"prompt": prompt_of(QUESTIONS[0]).replace("<image>", "")}])[
            0
        ].prompt_token_ids
    )
    (answer,) = generate(
        llm, [ask(QUESTIONS[0], picture("photo"), retention=retention, scope=scope)]
    )
    assert len(answer.prompt_token_ids) == text + budget


def test_all_tiles_of_all_images_are_analysed_and_chosen_in_one_batch(llm: Any) -> None:
    images = [picture("photo", 21), picture("2x2", 22)]
    llm.apply_model(watch_tower)
    llm.apply_model(watch_decisions)
    generate(llm, [ask(QUESTIONS[0], *images, retention=0.111)])
    assert llm.apply_model(tower_batches) == [[10]]
    assert llm.apply_model(decision_batches) == [[("analyze_tokens", 10), ("select_images", 10)]]


def watch_decisions(model: Any) -> None:
    """Note the rows of every analysis and selection in the worker from now on."""
    from msdg_vllm.methods import msdg

    model.decision_batches = []
    for name in ("analyze_tokens", "select_images"):
        original = getattr(msdg, name)

        def noted(
            data: Any, *args: Any, name: str = name, original: Any = original, **kw: Any
        ) -> Any:
            model.decision_batches.append((name, len(data)))
            return original(data, *args, **kw)

        setattr(msdg, name, noted)


def decision_batches(model: Any) -> list[tuple[str, int]]:
    return list(model.decision_batches)


def requests_of_every_kind() -> list[Request]:
    photo, strip, single = picture("photo", 1), picture("strip", 2), picture("one tile", 3)
    return [
        ask(QUESTIONS[0], photo, retention=0.056),
        ask(QUESTIONS[1], photo, retention=0.111, scope="image"),
        {"prompt": "USER: The quick brown fox ASSISTANT:"},
        ask(QUESTIONS[1], strip),
        ask(QUESTIONS[1], strip, single, retention=0.222),
        ask(QUESTIONS[0], strip, retention=0.111, query_mode="none"),
        ask(QUESTIONS[0], strip, retention=0.111, method="visionzip"),
        ask(QUESTIONS[0], photo, retention=0.056, method="hiprune", scope="image"),
    ]


def test_mixed_batch_equals_the_requests_one_by_one(llm: Any) -> None:
    together = generate(llm, requests_of_every_kind())
    forget(llm)
    for request, answer in zip(requests_of_every_kind(), together, strict=True):
        (alone,) = generate(llm, [request])
        assert_same(alone, answer)


def forget(llm: Any) -> None:
    """Empty every cache of the engine."""
    assert llm.reset_prefix_cache()
    llm.reset_mm_cache()
    llm.llm_engine.engine_core.reset_encoder_cache()


def test_a_budget_that_covers_every_patch_is_stock_with_its_newlines(llm: Any) -> None:
    image = picture("photo", 4)
    whole, almost = generate(
        llm, [ask(QUESTIONS[0], image), ask(QUESTIONS[0], image, retention=0.9)]
    )
    assert_same(almost, whole)


def test_unpruned_is_stock_vllm_to_the_bit(llm: Any, folder: Path) -> None:
    images = [picture(shape, seed) for seed, shape in enumerate(("photo", "strip", "1x3", "tiny"))]
    plain = [*(ask(QUESTIONS[0], image) for image in images), ask(QUESTIONS[1], *images[1:3])]
    expected, hashes = stock_answers(folder, plain, **OPTIONS)
    forget(llm)
    for wishes in ({}, {"retention": 1.0, "scope": "image"}):
        kwargs = processor_kwargs(wishes)
        requests = [{**request, "mm_processor_kwargs": kwargs} for request in plain]
        assert [image_hashes(llm, request) for request in requests] == hashes
        assert generate_one_by_one(llm, requests) == expected
        forget(llm)


@pytest.mark.parametrize("scope", ["tile", "image"])
def test_a_second_question_needs_no_encoder(llm: Any, scope: str) -> None:
    image = picture("2x1", 9)
    seconds = [
        ask(QUESTIONS[1], image, retention=0.05, scope=scope),
        ask(QUESTIONS[1], image, retention=0.1, scope=scope, method="cdpruner"),
    ]
    assert_encoded_once(llm, ask(QUESTIONS[0], image, retention=0.1, scope=scope), seconds)

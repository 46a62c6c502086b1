"""Mini-Gemini on the real engine, against plain PyTorch, timm and Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from msdg_vllm.models.mini_gemini.prepare import prepare
from tests.engine.generation import assert_same, generate, generated, running_engine
from tests.engine.mini_gemini_requests import QUESTIONS, ask, profile_in, prompt_of
from tests.engine.second_question import assert_encoded_once
from tests.mini_gemini_checkpoint import add_profile, make_mini_gemini
from tests.mini_gemini_reference import MiniGeminiReference
from tests.pictures import SIZES, picture_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint as published, and prepared for serving."""
    root = tmp_path_factory.mktemp("mini_gemini")
    published = make_mini_gemini(root / "published")
    prepare(published, root / "prepared")
    add_profile(root / "prepared")
    return published, root / "prepared"


@pytest.fixture(scope="module")
def reference(folders: tuple[Path, Path]) -> MiniGeminiReference:
    return MiniGeminiReference(folders[0], profile_in(folders[1]))


@pytest.fixture(scope="module")
def llm(folders: tuple[Path, Path]) -> Iterator[Any]:
    with running_engine(folders[1]) as engine:
        yield engine


def test_unpruned_answer_equals_the_reference(llm: Any, reference: MiniGeminiReference) -> None:
    pictures = [picture_of(kind, seed) for seed, kind in enumerate(SIZES)]
    answers = generate(llm, [ask(QUESTIONS[0], picture) for picture in pictures])
    for picture, answer in zip(pictures, answers, strict=True):
        assert_same(answer, reference.generate(prompt_of(QUESTIONS[0]), [picture]))


@pytest.mark.parametrize(("retention", "budget"), [(0.111, 7), (0.333, 21), (0.95, 61)])
def test_pruned_answer_equals_the_reference(
    llm: Any, reference: MiniGeminiReference, retention: float, budget: int
) -> None:
    pictures = [picture_of(kind, seed) for seed, kind in enumerate(SIZES)]
    answers = generate(
        llm, [ask(QUESTIONS[0], picture, retention=retention) for picture in pictures]
    )
    for picture, answer in zip(pictures, answers, strict=True):
        expected = reference.generate(
            prompt_of(QUESTIONS[0]), [picture], query=QUESTIONS[0], budget=budget
        )
        assert_same(answer, expected)


def test_without_a_query_only_kept_tokens_are_mined(
    llm: Any, reference: MiniGeminiReference
) -> None:
    picture = picture_of("wide", 7)
    llm.apply_model(watch_mining)
    (answer,) = generate(llm, [ask(QUESTIONS[0], picture, retention=0.222, query_mode="none")])
    assert llm.apply_model(mined_tokens) == [[14]]
    assert_same(answer, reference.generate(prompt_of(QUESTIONS[0]), [picture], budget=14))


def test_several_images_equal_the_reference(llm: Any, reference: MiniGeminiReference) -> None:
    pictures = [picture_of("wide", 1), picture_of("tall", 2), picture_of("square", 3)]
    (answer,) = generate(llm, [ask(QUESTIONS[1], *pictures, retention=0.222)])
    expected = reference.generate(
        prompt_of(QUESTIONS[1], 3), pictures, query=QUESTIONS[1], budget=14
    )
    assert_same(answer, expected)


def test_chat_uses_the_template_of_the_prepared_folder(
    llm: Any, reference: MiniGeminiReference
) -> None:
    from vllm import SamplingParams

    picture = picture_of("tall", 4)
    content = [
        {"type": "image_pil", "image_pil": picture},
        {"type": "text", "text": QUESTIONS[0]},
    ]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=5, ignore_eos=True)
    (output,) = llm.chat(
        [{"role": "user", "content": content}],
        params,
        mm_processor_kwargs={"retention": 0.222},
        use_tqdm=False,
    )
    expected = reference.generate(prompt_of(QUESTIONS[0]), [picture], query=QUESTIONS[0], budget=14)
    assert_same(generated(output), expected)


def test_mixed_batch_equals_the_requests_one_by_one(llm: Any) -> None:
    square, wide = picture_of("square", 11), picture_of("wide", 12)
    requests = [
        ask(QUESTIONS[0], square, retention=0.111),
        ask(QUESTIONS[1], square, wide, retention=0.333),
        ask(QUESTIONS[1], square),
        {"prompt": "USER: The quick brown fox ASSISTANT:"},
        ask(QUESTIONS[0], wide, retention=0.111, query_mode="none"),
    ]
    together = generate(llm, requests)
    assert llm.reset_prefix_cache()
    llm.reset_mm_cache()
    llm.llm_engine.engine_core.reset_encoder_cache()
    for request, answer in zip(requests, together, strict=True):
        (alone,) = generate(llm, [request])
        assert_same(alone, answer)


def watch_mining(model: Any) -> None:
    """Count the tokens of every call of the mining from now on."""
    model.mined_tokens = []
    forward = model.mining.forward

    def counted(tokens: Any, squares: Any) -> Any:
        model.mined_tokens.append(len(tokens))
        return forward(tokens, squares)

    model.mining.forward = counted


def mined_tokens(model: Any) -> list[int]:
    return list(model.mined_tokens)


def test_a_missing_weight_stops_the_start_and_is_named(
    folders: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    published, prepared = folders
    for path in prepared.iterdir():
        if path.name != "model.safetensors":
            (tmp_path / path.name).symlink_to(path)
    weights = load_file(published / "model.safetensors")
    del weights["model.vision_tower_aux.vision_stages.2.blocks.1.gamma"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError), running_engine(tmp_path):
        pass
    captured = capfd.readouterr()
    assert "vision_tower_aux.vision_stages.2.blocks.1.gamma" in captured.out + captured.err


def test_a_second_question_needs_no_encoder(llm: Any) -> None:
    picture = picture_of("wide", 31)
    second = ask(QUESTIONS[1], picture, retention=0.05)
    assert_encoded_once(llm, ask(QUESTIONS[0], picture, retention=0.2), [second])

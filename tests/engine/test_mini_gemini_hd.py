"""Mini-Gemini HD: five tiles, the model's first name, and towers from their own folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from msdg_vllm.models.mini_gemini.prepare import prepare
from tests.engine.generation import assert_same, generate, running_engine
from tests.engine.mini_gemini_requests import QUESTIONS, ask, profile_in, prompt_of
from tests.mini_gemini_checkpoint import add_profile, make_mini_gemini, make_tower_folders
from tests.mini_gemini_reference import MiniGeminiReference
from tests.pictures import picture_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mini_gemini_hd")
    published = make_mini_gemini(root / "published", hd=True, old_names=True)
    clip, convnext = make_tower_folders(root / "towers", seed=9)
    prepare(published, root / "prepared", clip_folder=clip, convnext_folder=convnext)
    add_profile(root / "prepared")
    return root


@pytest.fixture(scope="module")
def reference(folder: Path) -> MiniGeminiReference:
    return MiniGeminiReference(
        folder / "published",
        profile_in(folder / "prepared"),
        clip=folder / "towers" / "clip",
        convnext=folder / "towers" / "convnext",
    )


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    with running_engine(folder / "prepared") as engine:
        yield engine


def test_unpruned_answer_equals_the_reference(llm: Any, reference: MiniGeminiReference) -> None:
    pictures = [picture_of("wide", 1), picture_of("tall", 2)]
    for picture in pictures:
        (answer,) = generate(llm, [ask(QUESTIONS[0], picture)])
        assert_same(answer, reference.generate(prompt_of(QUESTIONS[0]), [picture]))


@pytest.mark.parametrize("scope", ["tile", "image"])
def test_pruned_answer_equals_the_reference(
    llm: Any, reference: MiniGeminiReference, scope: str
) -> None:
    picture = picture_of("wide", 3)
    (answer,) = generate(llm, [ask(QUESTIONS[1], picture, retention=0.222, scope=scope)])
    expected = reference.generate(
        prompt_of(QUESTIONS[1]), [picture], query=QUESTIONS[1], budget=14, scope=scope
    )
    assert_same(answer, expected)


def test_mining_before_or_after_selection_gives_the_same_answer(
    llm: Any, reference: MiniGeminiReference
) -> None:
    picture = picture_of("tall", 5)
    # Without a query the engine mines after selection; the reference always before.
    (answer,) = generate(llm, [ask(QUESTIONS[0], picture, retention=0.111, query_mode="none")])
    assert_same(answer, reference.generate(prompt_of(QUESTIONS[0]), [picture], budget=7))


def test_two_tensor_parallel_ranks_equal_one(
    llm: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = picture_of("wide", 3)
    requests = [
        ask(QUESTIONS[1], picture),
        ask(QUESTIONS[1], picture, retention=0.222),
        ask(QUESTIONS[1], picture, retention=0.222, scope="image", query_mode="none"),
    ]
    expected = generate(llm, requests)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with running_engine(folder / "prepared", tensor_parallel_size=2) as parallel:
        for answer, other in zip(generate(parallel, requests), expected, strict=True):
            assert_same(answer, other)

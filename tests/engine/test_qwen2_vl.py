"""Qwen2-VL on the real engine: the code of Qwen2.5-VL carries it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.generation import assert_same, generate, running_engine
from tests.engine.qwen_family import QwenSecondQuestions, ThinImages
from tests.engine.qwen_oracle import Medium, QwenOracle
from tests.engine.qwen_requests import QUESTIONS, ask, make_video, prompt_of
from tests.pictures import SIZES, picture_of
from tests.qwen_checkpoint import make_qwen2_vl


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen2_vl(tmp_path_factory.mktemp("qwen2_vl"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> QwenOracle:
    return QwenOracle(folder)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    with running_engine(
        folder,
        max_model_len=512,
        max_num_batched_tokens=40,
        block_size=32,
        limit_mm_per_prompt={"image": 12, "video": 2},
    ) as engine:
        yield engine


@pytest.mark.parametrize("retention", [0.05, 0.4])
def test_pruned_answers_equal_hugging_face(llm: Any, oracle: QwenOracle, retention: float) -> None:
    question = QUESTIONS[0]
    pictures = [picture_of(kind, seed) for seed, kind in enumerate(SIZES, start=2)]
    prompts = [*([picture] for picture in pictures), pictures[1:3], [make_video(6, 3)]]
    answers = generate(llm, [ask(question, *contents, retention=retention) for contents in prompts])
    for contents, answer in zip(prompts, answers, strict=True):
        media = [Medium(content, question, retention) for content in contents]
        assert_same(answer, oracle.generate(prompt_of(question, *contents), media))


class TestWhatQwensShare(QwenSecondQuestions, ThinImages):
    """The decoder's table is four times what a checkpoint names whoever asks."""

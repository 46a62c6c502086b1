"""The variants with experts: the same mixins before another language model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine import qwen_requests, test_glm4v
from tests.engine.generation import Request, assert_same, generate, running_engine
from tests.engine.qwen_oracle import Medium, QwenOracle
from tests.engine.qwen_requests import QUESTIONS, make_video
from tests.engine.test_qwen3_5 import HYBRID_OPTIONS
from tests.glm_checkpoint import make_glm4v
from tests.pictures import picture_of
from tests.qwen_checkpoint import make_qwen3_5, make_qwen3_vl

QUESTION = QUESTIONS[0]
OPTIONS = {
    "max_model_len": 512,
    "max_num_batched_tokens": 272,
    "limit_mm_per_prompt": {"image": 2, "video": 1},
}
IMAGES = ([picture_of("wide", 1)], [picture_of("tall", 2), picture_of("square", 3)])
VIDEOS = ([make_video(5, 3)],)


def ask_glm(contents: list[Any], **wishes: Any) -> Request:
    return test_glm4v.ask(*contents, **wishes)


def ask_qwen(contents: list[Any], **wishes: Any) -> Request:
    return qwen_requests.ask(QUESTION, *contents, **wishes)


@pytest.mark.parametrize(
    ("make", "ask", "contents", "options"),
    [
        pytest.param(make_qwen3_vl, ask_qwen, (*IMAGES, *VIDEOS), OPTIONS, id="qwen3_vl"),
        pytest.param(make_qwen3_5, ask_qwen, (*IMAGES, *VIDEOS), HYBRID_OPTIONS, id="qwen3_5"),
        pytest.param(make_glm4v, ask_glm, IMAGES, OPTIONS, id="glm4v"),
    ],
)
def test_pruned_answers_equal_hugging_face(
    tmp_path: Path,
    make: Callable[..., Path],
    ask: Callable[..., Request],
    contents: tuple[list[Any], ...],
    options: dict[str, Any],
) -> None:
    folder = make(tmp_path / "checkpoint", experts=True)
    cases = [(own, method) for own in contents for method in ("msdg", "divprune")]
    with running_engine(folder, **options) as llm:
        requests = [ask(own, retention=0.2, method=method) for own, method in cases]
        answers = generate(llm, requests, max_tokens=3)
    oracle = QwenOracle(folder)
    for (own, method), request, answer in zip(cases, requests, answers, strict=True):
        media = [Medium(content, QUESTION, 0.2, method) for content in own]
        assert_same(answer, oracle.generate(request["prompt"], media, max_tokens=3))

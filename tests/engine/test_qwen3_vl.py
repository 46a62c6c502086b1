"""Qwen3-VL on the real engine: DeepStack levels, interleaved M-RoPE, timestamps in videos."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from msdg_vllm.core.errors import RequestError
from tests.engine.generation import generate, running_engine
from tests.engine.method_oracle import REFERENCED
from tests.engine.qwen_family import OPTIONS, QwenFamily, ThinImages
from tests.engine.qwen_oracle import QwenOracle
from tests.engine.qwen_requests import QUESTIONS, ask
from tests.pictures import picture_of
from tests.qwen_checkpoint import make_qwen3_vl


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3_vl(tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> QwenOracle:
    return QwenOracle(folder)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    with running_engine(folder, **OPTIONS) as engine:
        yield engine


class TestQwen3VL(QwenFamily, ThinImages):
    methods = tuple(
        name for name in REFERENCED if name not in ("cls_attention", "visionzip", "pool")
    )
    method_wishes = (0.1, 11)


def test_a_method_that_merges_is_refused_where_tokens_carry_levels(llm: Any) -> None:
    request = ask(QUESTIONS[0], picture_of("wide", 1), retention=0.2, method="visionzip")
    with pytest.raises(RequestError, match=r"'visionzip' .*merges tokens.*carry 3 more"):
        generate(llm, [request])

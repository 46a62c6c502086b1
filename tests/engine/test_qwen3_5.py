"""Qwen3.5 on the real engine: Qwen3-VL's tower before a decoder that is partly recurrent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.generation import assert_same, generate, running_engine
from tests.engine.method_oracle import REFERENCED
from tests.engine.qwen_family import OPTIONS, QwenFamily, expected
from tests.engine.qwen_oracle import QwenOracle
from tests.engine.qwen_probes import tower_calls, watch_tower
from tests.engine.qwen_requests import QUESTIONS, ask, forget
from tests.pictures import picture_of
from tests.qwen_checkpoint import make_qwen3_5

# States of the recurrent layers are kept for whole blocks, which are large for their sake.
HYBRID_OPTIONS = {
    **{name: value for name, value in OPTIONS.items() if name != "block_size"},
    "max_model_len": 1024,
    "max_num_batched_tokens": 272,
    "disable_log_stats": False,
    "worker_extension_cls": "tests.engine.float32_delta_net.Extension",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3_5(tmp_path_factory.mktemp("qwen3_5"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> QwenOracle:
    return QwenOracle(folder)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    with running_engine(folder, **HYBRID_OPTIONS) as engine:
        yield engine


class TestQwen3_5(QwenFamily):
    options = HYBRID_OPTIONS
    methods = tuple(name for name in REFERENCED if name != "cls_attention")
    method_wishes = (0.1, 4)

    def test_prefix_hit_that_ends_inside_an_item_is_exact(
        self, llm: Any, oracle: QwenOracle
    ) -> None:
        # Two images that keep most: the second block ends inside the second one.
        contents, question = [picture_of("huge", 32), picture_of("huge", 33)], QUESTIONS[0]
        request = ask(question, *contents, retention=0.8)
        forget(llm)
        (first,) = generate(llm, [request])
        llm.llm_engine.engine_core.reset_encoder_cache()
        llm.apply_model(watch_tower)
        before = num_hits(llm)
        (second,) = generate(llm, [request])
        assert 0 < num_hits(llm) - before < len(first.prompt_token_ids)
        assert llm.apply_model(tower_calls)[0]
        answer = expected(oracle, question, contents, retention=0.8)
        assert_same(first, answer)
        assert_same(second, answer)


def num_hits(llm: Any) -> int:
    (metric,) = [m for m in llm.get_metrics() if m.name == "vllm:prefix_cache_hits"]
    return int(metric.value)

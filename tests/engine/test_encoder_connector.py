"""Encoder outputs that one engine stores and another loads, by vLLM's example connector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msdg_vllm.core.errors import SettingsError
from tests.checkpoints import make_llava
from tests.engine import probes, qwen_probes, qwen_requests
from tests.engine.generation import (
    Generated,
    Request,
    assert_same,
    generate,
    processor_kwargs,
    running_engine,
)
from tests.pictures import picture_of
from tests.qwen_checkpoint import make_qwen2_5_vl

QUESTION = "Is there a blue circle in the picture?"
OPTIONS = {"max_model_len": 1024, "max_num_batched_tokens": 640, "enable_prefix_caching": False}


def connector(folder: Path, role: str) -> dict[str, Any]:
    return {
        "ec_connector": "ECExampleConnector",
        "ec_role": role,
        "ec_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def ask_llava(*images: Any, **wishes: Any) -> Request:
    return {
        "prompt": "USER: " + "<image>\n" * len(images) + f"{QUESTION} ASSISTANT:",
        "multi_modal_data": {"image": list(images)},
        "mm_processor_kwargs": processor_kwargs(wishes),
    }


def ask_qwen(*images: Any, **wishes: Any) -> Request:
    return qwen_requests.ask(QUESTION, *images, **wishes)


@pytest.mark.parametrize(
    ("make", "ask", "watch", "calls"),
    [
        (make_llava, ask_llava, probes.watch_tower, probes.tower_batches),
        (make_qwen2_5_vl, ask_qwen, qwen_probes.watch_tower, qwen_probes.tower_calls),
    ],
    ids=["llava", "qwen2_5_vl"],
)
def test_answers_are_the_same_with_what_another_engine_encoded(
    tmp_path: Path, make: Any, ask: Any, watch: Any, calls: Any
) -> None:
    folder, stored = make(tmp_path / "model"), tmp_path / "stored"
    first, second = picture_of("wide", 1), picture_of("tall", 2)
    # A pruned and an unpruned image, in one prompt too: rows of both must be told apart.
    wishes: list[dict[str, Any]] = [{}, {"retention": 0.3}]
    wishes.append({"retention": 0.1, "method": "divprune"})
    requests = [ask(image, **wish) for image in (first, second) for wish in wishes]

    def answers(**options: Any) -> tuple[list[Generated], int]:
        with running_engine(folder, **OPTIONS, **options) as llm:
            llm.apply_model(watch)
            answered = [answer for one in requests for answer in generate(llm, [one])]
            answered += generate(llm, requests)
            return answered, sum(map(len, llm.apply_model(calls)))

    expected, _ = answers()
    produced, num_encoded = answers(ec_transfer_config=connector(stored, "ec_both"))
    assert num_encoded > 0
    assert len(list(stored.iterdir())) == len(requests)
    consumed, num_encoded = answers(ec_transfer_config=connector(stored, "ec_consumer"))
    assert num_encoded == 0
    for ours in (produced, consumed):
        for answer, other in zip(ours, expected, strict=True):
            assert_same(answer, other)


def test_an_engine_without_a_language_model_is_refused_with_a_sentence(tmp_path: Path) -> None:
    folder = make_llava(tmp_path / "model")
    with (
        pytest.raises(SettingsError, match=r"ec_producer.*ec_role ec_both"),
        running_engine(folder, ec_transfer_config=connector(tmp_path, "ec_producer")),
    ):
        pass

"""Qwen2.5-VL in bfloat16: unpruned to the bit as stock, many images within profiled memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from msdg_vllm.core.errors import RequestError
from msdg_vllm.request import PruningRequest
from tests.engine.generation import generate, image_hashes, running_engine, stock_answers
from tests.engine.probes import kept_tokens
from tests.engine.qwen_oracle import Medium, QwenOracle
from tests.engine.qwen_probes import tower_calls, watch_tower
from tests.engine.qwen_requests import QUESTIONS, ask, forget, make_video, prompt_of
from tests.pictures import SIZES, make_picture, picture_of
from tests.qwen_checkpoint import make_qwen2_5_vl

TOKEN_BUDGET = 2048
# Of log-probabilities, beside Hugging Face in bfloat16 as well; 0.029 was the most seen on a CPU.
TOLERANCE = 0.1
OPTIONS = {
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "max_num_batched_tokens": TOKEN_BUDGET,
    # One at a time: what shares a batch decides the last bits.
    "max_num_seqs": 1,
    "limit_mm_per_prompt": {"image": 32, "video": 1},
    "enable_mm_embeds": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen2_5_vl(tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    with running_engine(folder, **OPTIONS) as engine:
        yield engine


def test_unpruned_is_stock_vllm_to_the_bit(llm: Any, folder: Path) -> None:
    contents = [*(picture_of(kind, 50) for kind in SIZES), make_video(6, 51)]
    plain = [ask(QUESTIONS[0], content) for content in contents]
    expected, hashes = stock_answers(folder, plain, **OPTIONS)
    for wishes in ({}, {"retention": 1.0, "query": "fox"}):
        forget(llm)
        requests = [ask(QUESTIONS[0], content, **wishes) for content in contents]
        assert [image_hashes(llm, request) for request in requests] == hashes
        assert generate(llm, requests) == expected


def test_pruned_answers_are_near_those_of_hugging_face_with_the_same_tokens(
    llm: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = QwenOracle(folder)
    oracle.model.to(torch.bfloat16)
    question, farthest = QUESTIONS[0], 0.0
    for number, (kind, retention) in enumerate(product(SIZES, (0.1, 0.3, 0.6)), start=1):
        picture = picture_of(kind, number)
        pruning = PruningRequest(retention=retention, explanation=number)
        request = ask(question, picture, pruning=pruning)
        forget(llm)
        (answer,) = generate(llm, [request], max_tokens=1)
        forget(llm)
        assert generate(llm, [request], max_tokens=1) == [answer]
        (kept,) = llm.apply_model(partial(kept_tokens, key=number))

        def keep(pixels: Any, grid: Any, _: Any, kept: list[int] = kept) -> Any:
            return oracle.encode(pixels.bfloat16(), grid)[1], kept

        monkeypatch.setattr(oracle, "keep", keep)
        media = [Medium(picture, question, retention)]
        other = oracle.generate(prompt_of(question, picture), media, max_tokens=1)
        differences = [
            abs(logprob - other.logprobs[0][token]) for token, logprob in answer.logprobs[0].items()
        ]
        farthest = max(farthest, *differences)
    print(f"log-probabilities differ by {farthest:.3f} at most")
    assert farthest <= TOLERANCE


def test_tower_batches_of_many_large_images_stay_within_what_was_profiled(llm: Any) -> None:
    pictures = [make_picture(588, 392, seed) for seed in range(32)]
    llm.apply_model(watch_tower)
    (answer,) = generate(llm, [ask(QUESTIONS[0], *pictures, retention=0.05)], max_tokens=1)
    (calls,) = llm.apply_model(tower_calls)
    num_tokens = 21 * 14
    # 32 images of 15 kept tokens are one step to the scheduler, ten times what was profiled.
    assert len(answer.prompt_token_ids) < TOKEN_BUDGET < 32 * num_tokens
    assert sum(calls) == 32 * num_tokens
    assert max(calls) == TOKEN_BUDGET // num_tokens * num_tokens


def test_precomputed_embeddings_are_served_whole_and_refused_to_be_pruned(llm: Any) -> None:
    embeddings = {
        "image_embeds": torch.ones(6, 64, dtype=torch.bfloat16),
        "image_grid_thw": torch.tensor([[1, 4, 6]]),
    }
    request = {**ask(QUESTIONS[0], picture_of("tiny")), "multi_modal_data": {"image": embeddings}}
    (answer,) = generate(llm, [request])
    assert len(answer.token_ids) == 6
    wishes = {"mm_processor_kwargs": {"retention": 0.5}}
    with pytest.raises(RequestError, match=r"retention 0\.5 needs pixels.*send retention 1\.0"):
        generate(llm, [{**request, **wishes}])

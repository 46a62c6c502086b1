"""Qwen2.5-VL on the real engine, against Hugging Face, under chunking, caching and batching."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from msdg_vllm.calibration.loading import load_tower
from msdg_vllm.core.errors import RequestError
from tests.engine.generation import (
    Generated,
    Request,
    assert_same,
    generate,
    generated,
    image_hashes,
    running_engine,
    stock_answers,
)
from tests.engine.method_oracle import REFERENCED
from tests.engine.qwen_family import QwenResizing, QwenSecondQuestions, ThinImages
from tests.engine.qwen_oracle import Medium, QwenOracle
from tests.engine.qwen_probes import (
    encoder_graph_modalities,
    record_states,
    take_states,
    tower_calls,
    watch_tower,
)
from tests.engine.qwen_requests import QUESTIONS, ask, forget, make_video, prompt_of
from tests.pictures import SIZES, picture_of
from tests.qwen_checkpoint import make_qwen2_5_vl

RETENTIONS = (0.05, 0.222, 0.6)
# With these no method has a decision that is too close to call.
METHOD_RETENTION, METHOD_SEED = 0.1, 4
BLOCK_SIZE = 32
OPTIONS = {
    "max_model_len": 512,
    # Cuts every image into chunks, and blocks end inside images.
    "max_num_batched_tokens": 20,
    "block_size": BLOCK_SIZE,
    # Too few for sixteen requests at once, so that some of them are preempted.
    "num_gpu_blocks_override": 18,
    "scheduler_reserve_full_isl": False,
    "enable_prefix_caching": True,
    "limit_mm_per_prompt": {"image": 12, "video": 2},
    "disable_log_stats": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen2_5_vl(tmp_path_factory.mktemp("qwen2_5_vl"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> QwenOracle:
    return QwenOracle(folder)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    with running_engine(folder, **OPTIONS) as engine:
        yield engine


@pytest.mark.parametrize("kind", ["wide", "tall", "square", "huge"])
def test_captured_states_equal_hugging_face(llm: Any, oracle: QwenOracle, kind: str) -> None:
    picture = picture_of(kind, 21)
    llm.apply_model(record_states)
    generate(llm, [ask(QUESTIONS[0], picture, retention=0.05, method="evocut")], max_tokens=1)
    ((states,),) = llm.apply_model(take_states)
    inputs = oracle.inputs(prompt_of(QUESTIONS[0], picture), [Medium(picture, "", 1.0)])
    expected, _ = oracle.encode(inputs["pixel_values"], inputs["image_grid_thw"][0])
    _, rows, columns = inputs["image_grid_thw"][0].tolist()
    assert max(rows, columns) > 8, "one attention window would not be permuted"
    assert set(states) >= set(oracle.profile.layers)
    for layer, state in states.items():
        assert (torch.from_numpy(state) - expected[layer]).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["wide", "tall"])
def test_calibration_sees_the_states_that_the_server_captures(
    llm: Any, folder: Path, kind: str
) -> None:
    picture = picture_of(kind, 22)
    llm.apply_model(record_states)
    generate(llm, [ask(QUESTIONS[0], picture, retention=0.05, method="evocut")], max_tokens=1)
    ((states,),) = llm.apply_model(take_states)
    encoded = load_tower(str(folder)).encode(picture)
    for layer, state in states.items():
        assert (torch.from_numpy(state) - encoded.states[layer]).abs().max() < 1e-4


@pytest.mark.parametrize("retention", RETENTIONS)
def test_pruned_answer_equals_hugging_face(llm: Any, oracle: QwenOracle, retention: float) -> None:
    question = QUESTIONS[0]
    pictures = [picture_of(kind, seed) for seed, kind in enumerate(SIZES)]
    answers = generate(llm, [ask(question, picture, retention=retention) for picture in pictures])
    for picture, answer in zip(pictures, answers, strict=True):
        expected = oracle.generate(
            prompt_of(question, picture), [Medium(picture, question, retention)]
        )
        assert_same(answer, expected)


METHODS = [name for name in REFERENCED if name != "cls_attention"]


@pytest.fixture(scope="module")
def answers_by_method(llm: Any) -> dict[str, Generated]:
    """A wide picture and a video to all methods that fit, in one mixed batch."""
    contents = [picture_of("wide", METHOD_SEED), make_video(6, 3)]
    requests = [
        ask(QUESTIONS[0], *contents, retention=METHOD_RETENTION, method=name) for name in METHODS
    ]
    return dict(zip(METHODS, generate(llm, requests), strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_equals_its_reference_on_hugging_face_states(
    answers_by_method: dict[str, Generated], oracle: QwenOracle, method: str
) -> None:
    contents = [picture_of("wide", METHOD_SEED), make_video(6, 3)]
    expected = oracle.generate(
        prompt_of(QUESTIONS[0], *contents),
        [Medium(content, QUESTIONS[0], METHOD_RETENTION, method) for content in contents],
    )
    assert_same(answers_by_method[method], expected)


class TestResizing(QwenResizing):
    """With attention windows, and preempted requests beside."""


def test_a_method_that_needs_a_class_token_is_refused_and_others_are_named(llm: Any) -> None:
    request = ask(QUESTIONS[0], picture_of("wide", 1), retention=0.222, method="cls_attention")
    with pytest.raises(
        RequestError,
        match=r"'cls_attention' cannot prune this model.*class token.*'msdg', 'random'",
    ) as refusal:
        generate(llm, [request])
    assert "cls_attention" not in str(refusal.value).split("methods that can are")[1]


@pytest.mark.parametrize("retention", RETENTIONS)
def test_images_of_different_sizes_back_to_back_equal_hugging_face(
    llm: Any, oracle: QwenOracle, retention: float
) -> None:
    pictures = [picture_of("tall", 2), picture_of("wide", 3)]
    question = QUESTIONS[1]
    (answer,) = generate(llm, [ask(question, *pictures, retention=retention)])
    expected = oracle.generate(
        prompt_of(question, *pictures),
        [Medium(picture, question, retention) for picture in pictures],
    )
    assert_same(answer, expected)


@pytest.mark.parametrize(
    "error",
    [
        {"token_shift": (1, 0, 0)},
        {"token_shift": (0, 1, 0)},
        {"token_shift": (0, 0, 1)},
        {"text_shift": 1},
        {"text_shift": -1},
    ],
    ids=str,
)
def test_comparison_notices_a_position_error_of_one(
    llm: Any, oracle: QwenOracle, error: dict[str, Any]
) -> None:
    picture, question = picture_of("wide", 1), QUESTIONS[0]
    media = [Medium(picture, question, 0.222)]
    (answer,) = generate(llm, [ask(question, picture, retention=0.222)])
    assert_same(answer, oracle.generate(prompt_of(question, picture), media))
    with pytest.raises(AssertionError):
        assert_same(answer, oracle.generate(prompt_of(question, picture), media, **error))


def test_each_image_of_a_chat_has_its_own_query_and_budget(llm: Any, oracle: QwenOracle) -> None:
    from vllm import SamplingParams

    first, second = picture_of("square", 7), picture_of("tall", 8)
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "image_pil", "image_pil": first},
                {"type": "text", "text": QUESTIONS[0]},
            ],
        },
        {"role": "assistant", "content": "yes"},
        {
            "role": "user",
            "content": [
                {"type": "image_pil", "image_pil": second, "retention": 0.6},
                {"type": "text", "text": QUESTIONS[1]},
            ],
        },
    ]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=5, ignore_eos=True)
    (output,) = llm.chat(messages, params, mm_processor_kwargs={"retention": 0.222}, use_tqdm=False)
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    prompt = (
        f"<|im_start|>user\n{image}{QUESTIONS[0]}<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
        f"<|im_start|>user\n{image}{QUESTIONS[1]}<|im_end|>\n<|im_start|>assistant\n"
    )
    expected = oracle.generate(
        prompt, [Medium(first, QUESTIONS[0], 0.222), Medium(second, QUESTIONS[1], 0.6)]
    )
    assert_same(generated(output), expected)


def test_prefix_hit_over_the_whole_image_needs_no_encoder(llm: Any, oracle: QwenOracle) -> None:
    picture = picture_of("tall", 31)
    wishes = {"retention": 0.222, "query": "fox"}
    # Both prompts go on alike behind the image, up to the end of a block.
    shared = "Describe the image in detail, then answer with a single word or phrase. "
    first, second = shared + "Which colour?", shared + "How many green stars?"
    before = "The quick brown fox jumps over the lazy dog. "
    requests = [
        {**ask(text, picture, **wishes), "prompt": prompt_of(text, picture, before=before)}
        for text in (first, second)
    ]
    forget(llm)
    generate(llm, requests[:1])
    llm.llm_engine.engine_core.reset_encoder_cache()
    llm.apply_model(watch_tower)
    (answer,) = generate(llm, requests[1:])
    assert llm.apply_model(tower_calls) == [[]]
    expected = oracle.generate(requests[1]["prompt"], [Medium(picture, "fox", 0.222)])
    assert_same(answer, expected)


def test_prefix_hit_that_ends_inside_an_image_is_exact(llm: Any, oracle: QwenOracle) -> None:
    picture, question = picture_of("wide", 32), QUESTIONS[0]
    request = ask(question, picture, retention=0.45)
    forget(llm)
    (first,) = generate(llm, [request])
    spots = [n for n, token in enumerate(first.prompt_token_ids)
             if token == oracle.processor.image_token_id]  # fmt: skip
    hit = (len(first.prompt_token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert spots[0] < hit <= spots[-1]
    llm.llm_engine.engine_core.reset_encoder_cache()
    llm.apply_model(watch_tower)
    (second,) = generate(llm, [request])
    assert llm.apply_model(tower_calls) == [[224]]
    expected = oracle.generate(request["prompt"], [Medium(picture, question, 0.45)])
    assert_same(first, expected)
    assert_same(second, expected)


def test_same_image_with_another_query_is_selected_anew(llm: Any, oracle: QwenOracle) -> None:
    picture = picture_of("square", 33)
    for query in ("green stars", "fox"):
        (answer,) = generate(llm, [ask(QUESTIONS[0], picture, retention=0.222, query=query)])
        expected = oracle.generate(
            prompt_of(QUESTIONS[0], picture), [Medium(picture, query, 0.222)]
        )
        assert_same(answer, expected)


def sixteen_requests() -> list[Request]:
    """Requests of every kind, more than the cache holds at once."""
    text_only: Request = {"prompt": "<|im_start|>user\nRead<|im_end|>\n<|im_start|>assistant\n"}
    pictures = [picture_of(kind, seed) for seed, kind in enumerate(SIZES, start=40)]
    video = make_video(6, 5)
    return [
        *(ask(QUESTIONS[0], picture, retention=0.6) for picture in pictures),
        *(ask(QUESTIONS[1], picture, retention=0.222) for picture in pictures),
        ask(QUESTIONS[0], pictures[0]),
        ask(QUESTIONS[0], video, retention=0.222),
        ask(QUESTIONS[0], pictures[1], pictures[2], retention=0.222),
        ask(QUESTIONS[1], pictures[2], video, retention=0.3),
        text_only,
        ask(QUESTIONS[1], video),
    ]


def test_sixteen_at_once_equal_one_by_one(llm: Any) -> None:
    requests = sixteen_requests()
    assert len(requests) == 16
    forget(llm)
    preempted = num_preemptions(llm)
    together = generate(llm, requests, max_tokens=24)
    assert num_preemptions(llm) > preempted
    forget(llm)
    for request, answer in zip(requests, together, strict=True):
        (alone,) = generate(llm, [request], max_tokens=24)
        assert_same(alone, answer)


def num_preemptions(llm: Any) -> int:
    (metric,) = [m for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
    return int(metric.value)


@pytest.mark.parametrize("retention", RETENTIONS)
def test_pruned_video_equals_hugging_face(llm: Any, oracle: QwenOracle, retention: float) -> None:
    # An odd number of frames is padded to whole temporal patches.
    video, question = make_video(5, 3), QUESTIONS[0]
    (answer,) = generate(llm, [ask(question, video, retention=retention)])
    expected = oracle.generate(prompt_of(question, video), [Medium(video, question, retention)])
    assert_same(answer, expected)


def test_image_and_video_in_one_prompt_equal_hugging_face(llm: Any, oracle: QwenOracle) -> None:
    picture, video, question = picture_of("wide", 9), make_video(6, 3), QUESTIONS[1]
    (answer,) = generate(llm, [ask(question, picture, video, retention=0.222)])
    expected = oracle.generate(
        prompt_of(question, picture, video),
        [Medium(picture, question, 0.222), Medium(video, question, 0.222)],
    )
    assert_same(answer, expected)


def test_budget_counts_merged_tokens_at_the_size_the_request_asks_for(llm: Any) -> None:
    picture = Image.new("RGB", (560, 280))
    whole, pruned = generate(
        llm,
        [
            ask(QUESTIONS[0], picture, max_pixels=50 * 28 * 28, **wishes)
            for wishes in ({}, {"retention": 0.5})
        ],
        max_tokens=1,
    )
    # 10 x 5 tokens fit into 50; half of them are kept.
    assert len(whole.prompt_token_ids) - len(pruned.prompt_token_ids) == 25


def test_processor_kwargs_that_hide_the_geometry_are_refused(llm: Any) -> None:
    picture = Image.new("RGB", (1120, 560))
    with pytest.raises(RequestError, match="800 tokens with these mm_processor_kwargs, 288 by"):
        generate(llm, [ask(QUESTIONS[0], picture, retention=0.5, do_resize=False)])


def test_encoder_cuda_graphs_stay_off(llm: Any) -> None:
    assert llm.apply_model(encoder_graph_modalities) == [[]]


def test_unpruned_is_stock_vllm_to_the_bit(llm: Any, folder: Path) -> None:
    contents = [*(picture_of(kind, 50) for kind in SIZES), make_video(6, 51)]
    plain = [ask(QUESTIONS[0], content) for content in contents]
    # One at a time: what shares a batch decides the last bits.
    expected, hashes = stock_answers(folder, plain, **{**OPTIONS, "max_num_seqs": 1})
    for wishes in ({}, {"retention": 1.0, "query": "fox"}):
        forget(llm)
        requests = [ask(QUESTIONS[0], content, **wishes) for content in contents]
        assert [image_hashes(llm, request) for request in requests] == hashes
        assert [generate(llm, [request])[0] for request in requests] == expected


class TestWhatQwensShare(QwenSecondQuestions, ThinImages):
    """The decoder's table is four times what a checkpoint names whoever asks."""

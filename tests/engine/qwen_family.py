"""What every model made of Qwen's mixins has to do; a test module adds `llm` and `oracle`."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from msdg_vllm.core.errors import RequestError
from msdg_vllm.request import PruningRequest
from tests.engine.generation import (
    Generated,
    Request,
    assert_same,
    generate,
    image_hashes,
    stock_answers,
)
from tests.engine.probes import kept_tokens
from tests.engine.qwen_oracle import Medium, QwenOracle
from tests.engine.qwen_probes import encoder_graph_modalities, tower_calls, watch_tower
from tests.engine.qwen_requests import QUESTIONS, ask, forget, make_video, prompt_of
from tests.engine.second_question import assert_encoded_once
from tests.pictures import SIZES, make_picture, picture_of

RETENTIONS = (0.05, 0.4)
BLOCK_SIZE = 32
OPTIONS = {
    "max_model_len": 512,
    # Cuts every image into chunks, and blocks end inside images and videos.
    "max_num_batched_tokens": 20,
    "block_size": BLOCK_SIZE,
    "enable_prefix_caching": True,
    "limit_mm_per_prompt": {"image": 12, "video": 2},
}
ERRORS = (
    {"token_shift": (1, 0, 0)},
    {"token_shift": (0, 1, 0)},
    {"token_shift": (0, 0, 1)},
    {"text_shift": 1},
    {"text_shift": -1},
)


def expected(oracle: QwenOracle, question: str, contents: list[Any], **wishes: Any) -> Generated:
    """What Hugging Face answers, with the same wishes for all images and videos."""
    media = [Medium(content, question, **wishes) for content in contents]
    return oracle.generate(prompt_of(question, *contents), media)


class ThinImages:
    """Short pruned prompts that reach far, on a checkpoint that names 512 positions."""

    @staticmethod
    def pictures(oracle: QwenOracle, number: int) -> list[Any]:
        """Images of one row of 150 tokens."""
        side = 2 * oracle.processor.image_processor.patch_size
        return [make_picture(150 * side, side, seed) for seed in range(number)]

    def test_thin_images_beyond_the_trained_positions_equal_hugging_face(
        self, llm: Any, oracle: QwenOracle
    ) -> None:
        # 9 x 150 positions in a few tokens; the table has four times what the checkpoint names.
        contents = self.pictures(oracle, 9)
        (answer,) = generate(llm, [ask(QUESTIONS[0], *contents, retention=0.01)])
        assert len(answer.prompt_token_ids) < 60
        assert_same(answer, expected(oracle, QUESTIONS[0], contents, retention=0.01))

    def test_images_that_reach_beyond_the_table_are_refused_and_the_engine_lives(
        self, llm: Any, oracle: QwenOracle
    ) -> None:
        contents = self.pictures(oracle, 12)
        with pytest.raises(RequestError, match=r"reach 2288 .*up to 2048\. Send fewer"):
            generate(llm, [ask(QUESTIONS[0], *contents, retention=0.01)])
        generate(llm, [ask(QUESTIONS[0], contents[0], retention=0.01)], max_tokens=1)


class QwenResizing:
    """Images that are scaled down before the encoder."""

    def test_resized_images_are_smaller_images_to_hugging_face(
        self, llm: Any, oracle: QwenOracle
    ) -> None:
        pictures, question = [picture_of("square", 3), picture_of("wide", 1)], QUESTIONS[0]
        retention = 0.6
        # Scaled alone they keep all their tokens; beside them, one that is pruned as well.
        both = [ask(question, *pictures, retention=retention, method="resize")]
        budgets = [int(oracle.num_tokens(picture) * retention + 0.5) for picture in pictures]
        smaller = [oracle.scaled(one, most) for one, most in zip(pictures, budgets, strict=True)]
        answer, halved = generate(
            llm,
            [*both, ask(question, pictures[0], retention=retention, method="resize+msdg")],
        )
        assert_same(answer, expected(oracle, question, smaller, retention=1.0))
        half = oracle.scaled(pictures[0], math.isqrt(oracle.num_tokens(pictures[0]) * budgets[0]))
        kept = min(budgets[0], oracle.num_tokens(half)) / oracle.num_tokens(half)
        assert kept < 1
        assert_same(halved, expected(oracle, question, [half], retention=kept, has_sinks=False))
        # At their own size they would be other images.
        with pytest.raises(AssertionError):
            assert_same(answer, expected(oracle, question, pictures, retention=1.0))

    def test_a_resized_image_says_what_it_was_and_shows_a_coarse_grid(
        self, llm: Any, oracle: QwenOracle
    ) -> None:
        from vllm import SamplingParams

        picture = picture_of("square", 5)
        pruning = PruningRequest(retention=0.6, method="resize", explanation=4711)
        request = ask(QUESTIONS[0], picture, pruning=pruning)
        (output,) = llm.generate([request], SamplingParams(max_tokens=1), use_tqdm=False)
        num_tokens = oracle.num_tokens(picture)
        smaller = oracle.num_tokens(oracle.scaled(picture, int(num_tokens * 0.6 + 0.5)))
        assert output.visual_tokens.kept == smaller < num_tokens == output.visual_tokens.total
        (kept,) = llm.apply_model(partial(kept_tokens, key=4711))
        assert kept == list(range(smaller))

    def test_what_cannot_be_scaled_is_refused(self, llm: Any) -> None:
        video = ask(QUESTIONS[0], make_video(6, 3), retention=0.3, method="resize")
        with pytest.raises(RequestError, match=r"'resize' scales images and no videos"):
            generate(llm, [video])


class QwenSecondQuestions:
    """Questions about images and videos that the encoder has seen."""

    def test_a_second_question_needs_no_encoder(self, llm: Any) -> None:
        contents = [picture_of("wide", 41), make_video(4, 42), picture_of("tall", 43)]
        seconds = [
            ask(QUESTIONS[1], *contents[::-1], retention=0.05),
            ask(QUESTIONS[1], contents[1], retention=0.4, method="divprune"),
        ]
        assert_encoded_once(llm, ask(QUESTIONS[0], *contents, retention=0.4), seconds)


class QwenFamily(QwenResizing, QwenSecondQuestions):
    """Images, videos, batches and caches against Hugging Face and stock vLLM."""

    options: dict[str, Any] = OPTIONS
    """Those of the engine."""

    methods: tuple[str, ...]
    """Methods that the family's rows allow."""

    image_seeds = (0, 1, 2, 3, 4)
    """With these pictures no decision is too close for float32."""

    method_wishes: tuple[float, int]
    """A retention and a picture with which no method has a decision that is too close."""

    @pytest.mark.parametrize("retention", RETENTIONS)
    def test_pruned_images_equal_hugging_face(
        self, llm: Any, oracle: QwenOracle, retention: float
    ) -> None:
        question = QUESTIONS[0]
        pictures = [
            picture_of(kind, seed) for seed, kind in zip(self.image_seeds, SIZES, strict=True)
        ]
        answers = generate(llm, [ask(question, image, retention=retention) for image in pictures])
        for picture, answer in zip(pictures, answers, strict=True):
            assert_same(answer, expected(oracle, question, [picture], retention=retention))

    def test_comparison_notices_an_error_of_one(self, llm: Any, oracle: QwenOracle) -> None:
        picture, question = picture_of("wide", 1), QUESTIONS[0]
        media = [Medium(picture, question, 0.222)]
        (answer,) = generate(llm, [ask(question, picture, retention=0.222)])
        assert_same(answer, oracle.generate(prompt_of(question, picture), media))
        errors: list[dict[str, Any]] = [*ERRORS]
        if oracle.num_levels:
            errors.append({"without_levels": True})
        for error in errors:
            with pytest.raises(AssertionError):
                assert_same(answer, oracle.generate(prompt_of(question, picture), media, **error))

    @pytest.mark.parametrize("retention", RETENTIONS)
    def test_pruned_videos_equal_hugging_face(
        self, llm: Any, oracle: QwenOracle, retention: float
    ) -> None:
        # An odd number of frames is padded to whole temporal patches; one patch is one frame.
        videos, question = [make_video(5, 3), make_video(2, 4)], QUESTIONS[0]
        answers = generate(llm, [ask(question, video, retention=retention) for video in videos])
        for video, answer in zip(videos, answers, strict=True):
            assert_same(answer, expected(oracle, question, [video], retention=retention))

    def test_images_and_videos_in_one_prompt_equal_hugging_face(
        self, llm: Any, oracle: QwenOracle
    ) -> None:
        contents = [picture_of("tall", 2), picture_of("wide", 9), make_video(6, 3)]
        (answer,) = generate(llm, [ask(QUESTIONS[1], *contents, retention=0.222)])
        assert_same(answer, expected(oracle, QUESTIONS[1], contents, retention=0.222))

    def test_every_method_equals_its_reference(self, llm: Any, oracle: QwenOracle) -> None:
        retention, seed = self.method_wishes
        contents, question = [picture_of("wide", seed), make_video(6, 3)], QUESTIONS[0]
        answers = generate(
            llm,
            [ask(question, *contents, retention=retention, method=name) for name in self.methods],
        )
        for method, answer in zip(self.methods, answers, strict=True):
            assert_same(
                answer, expected(oracle, question, contents, retention=retention, method=method)
            )

    def test_mixed_batch_equals_its_requests_one_by_one(self, llm: Any) -> None:
        text_only: Request = {"prompt": "<|im_start|>user\nRead<|im_end|>\n<|im_start|>assistant\n"}
        pictures = [picture_of(kind, 40) for kind in ("wide", "tall", "tiny")]
        video = make_video(6, 5)
        requests = [
            *(ask(QUESTIONS[0], picture, retention=0.6) for picture in pictures),
            *(ask(QUESTIONS[1], picture, retention=0.222) for picture in pictures),
            ask(QUESTIONS[0], pictures[0]),
            text_only,
            ask(QUESTIONS[0], video),
            ask(QUESTIONS[1], video, retention=0.3),
            ask(QUESTIONS[1], pictures[1], video, retention=0.2, method="divprune"),
        ]
        forget(llm)
        together = generate(llm, requests)
        forget(llm)
        for request, answer in zip(requests, together, strict=True):
            (alone,) = generate(llm, [request])
            assert_same(alone, answer)

    @pytest.mark.parametrize("kind", ["image", "video"])
    def test_prefix_hit_that_ends_inside_an_item_is_exact(
        self, llm: Any, oracle: QwenOracle, kind: str
    ) -> None:
        content = picture_of("wide", 32) if kind == "image" else make_video(6, 7)
        question = QUESTIONS[0]
        request = ask(question, content, retention=0.4)
        forget(llm)
        (first,) = generate(llm, [request])
        # The texts of a video are between these two as well.
        config = oracle.model.config
        start = first.prompt_token_ids.index(config.vision_start_token_id) + 1
        end = first.prompt_token_ids[::-1].index(config.vision_end_token_id)
        hit = (len(first.prompt_token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert start < hit < len(first.prompt_token_ids) - end - 1
        llm.llm_engine.engine_core.reset_encoder_cache()
        llm.apply_model(watch_tower)
        (second,) = generate(llm, [request])
        assert len(llm.apply_model(tower_calls)[0]) == 1
        answer = expected(oracle, question, [content], retention=0.4)
        assert_same(first, answer)
        assert_same(second, answer)

    def test_encoder_cuda_graphs_stay_off(self, llm: Any) -> None:
        assert llm.apply_model(encoder_graph_modalities) == [[]]

    def test_unpruned_is_stock_vllm_to_the_bit(self, llm: Any, folder: Path) -> None:
        contents = [*(picture_of(kind, 50) for kind in SIZES), make_video(6, 51)]
        plain = [ask(QUESTIONS[0], content) for content in contents]
        # One at a time: what shares a batch decides the last bits.
        answers, hashes = stock_answers(folder, plain, **{**self.options, "max_num_seqs": 1})
        forget(llm)
        requests = [ask(QUESTIONS[0], c, retention=1.0, query="fox") for c in contents]
        assert [image_hashes(llm, request) for request in requests] == hashes
        assert [generate(llm, [request])[0] for request in requests] == answers

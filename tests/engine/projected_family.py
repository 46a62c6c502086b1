"""What every model that is pruned by its projected tokens has to do.

A test module adds `llm`, `oracle`, `folder` and the texts of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from msdg_vllm.core.errors import RequestError
from msdg_vllm.request import PruningRequest
from tests.engine.generation import (
    Request,
    assert_same,
    generate,
    image_hashes,
    processor_kwargs,
    stock_answers,
)
from tests.engine.probes import explained
from tests.engine.projected_oracle import READ_ROWS_ALONE, ProjectedOracle
from tests.engine.qwen_probes import encoder_graph_modalities
from tests.engine.qwen_requests import forget
from tests.engine.second_question import assert_encoded_once
from tests.pictures import SIZES, picture_of

QUESTION = "Is there a blue circle in the picture?"
BLOCK_SIZE = 32
OPTIONS: dict[str, Any] = {
    "max_model_len": 1024,
    # Cuts images into chunks, and blocks end inside images.
    "max_num_batched_tokens": 40,
    "block_size": BLOCK_SIZE,
    "enable_prefix_caching": True,
}


class ProjectedFamily:
    """Images, batches and caches against Hugging Face and stock vLLM."""

    options: dict[str, Any] = OPTIONS
    placeholder: str
    """What a prompt has for an image."""

    around: tuple[str, str]
    """What the model reads before and behind the rows of an image."""

    served_whole: tuple[str, ...] = tuple(SIZES)
    """Sizes of images that stock vLLM takes with these options."""

    image_seeds = (0, 1, 2, 3, 4)
    """With these pictures no decision is too close for float32."""

    hit_wishes = (0.6, 32)
    """A retention and a picture: the last whole block of the prompt ends inside the image."""

    method_wishes = (0.1, 4)
    """A retention and a picture with which no method has a decision that is too close."""

    def prompt(self, num_images: int) -> str:
        return f"user: {self.placeholder * num_images} {QUESTION} assistant:"

    def ask(self, *pictures: Any, **wishes: Any) -> Request:
        """A question about images; the query is named, so that no template has to be read."""
        if wishes:
            wishes.setdefault("query", QUESTION)
        return {
            "prompt": self.prompt(len(pictures)),
            "multi_modal_data": {"image": list(pictures)},
            "mm_processor_kwargs": processor_kwargs(wishes),
        }

    def texts(self, num_images: int) -> Sequence[str]:
        """The texts of a prompt before, between and behind the rows of its images."""
        before, behind = self.around
        return self.prompt(num_images).replace(self.placeholder, f"{before}\0{behind}").split("\0")

    @pytest.mark.parametrize("retention", [0.05, 0.4])
    def test_pruned_images_equal_hugging_face(
        self, llm: Any, oracle: ProjectedOracle, retention: float
    ) -> None:
        pictures = [
            picture_of(kind, seed) for seed, kind in zip(self.image_seeds, SIZES, strict=True)
        ]
        requests = [[picture] for picture in pictures] + [pictures[1:3]]
        answers = generate(llm, [self.ask(*own, retention=retention) for own in requests])
        for own, answer in zip(requests, answers, strict=True):
            expected = oracle.generate(self.texts(len(own)), own, QUESTION, retention)
            assert_same(answer, expected)

    def test_every_method_equals_its_reference(self, llm: Any, oracle: ProjectedOracle) -> None:
        retention, seed = self.method_wishes
        picture = picture_of("wide", seed)
        answers = generate(
            llm, [self.ask(picture, retention=retention, method=name) for name in READ_ROWS_ALONE]
        )
        for method, answer in zip(READ_ROWS_ALONE, answers, strict=True):
            expected = oracle.generate(self.texts(1), [picture], QUESTION, retention, method)
            assert_same(answer, expected)

    def test_comparison_notices_one_wrong_row(
        self, llm: Any, oracle: ProjectedOracle, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        picture = picture_of("wide", 1)
        (answer,) = generate(llm, [self.ask(picture, retention=0.2)])
        kept = oracle.keep(picture, QUESTION, 0.2, "divprune")
        swapped = kept.clone()
        swapped[[0, 1]] = kept[[1, 0]]
        monkeypatch.setattr(oracle, "keep", lambda *_: swapped)
        wrong = oracle.generate(self.texts(1), [picture], QUESTION, 0.2)
        with pytest.raises(AssertionError):
            assert_same(answer, wrong)

    def test_prefix_hit_that_ends_inside_an_image_is_exact(
        self, llm: Any, oracle: ProjectedOracle
    ) -> None:
        retention, seed = self.hit_wishes
        picture = picture_of("wide", seed)
        request = self.ask(picture, retention=retention)
        forget(llm)
        (first,) = generate(llm, [request])
        hit = (len(first.prompt_token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
        texts = self.texts(1)
        start, end = (
            len(oracle.tokenizer.encode(text, add_special_tokens=False)) for text in texts
        )
        assert start < hit < len(first.prompt_token_ids) - end
        llm.llm_engine.engine_core.reset_encoder_cache()
        (second,) = generate(llm, [request])
        expected = oracle.generate(texts, [picture], QUESTION, retention)
        assert_same(first, expected)
        assert_same(second, expected)

    def test_mixed_batch_equals_its_requests_one_by_one(self, llm: Any) -> None:
        pictures = [picture_of(kind, 40) for kind in ("wide", "tall", "tiny")]
        requests = [
            *(self.ask(picture, retention=0.6) for picture in pictures),
            *(self.ask(picture, retention=0.1, method="cdpruner") for picture in pictures),
            self.ask(pictures[0], retention=0.2, method="random"),
            self.ask(pictures[0]),
            self.ask(*pictures[:2], retention=0.3),
            {"prompt": "user: Read assistant:"},
        ]
        forget(llm)
        together = generate(llm, requests)
        forget(llm)
        for request, answer in zip(requests, together, strict=True):
            (alone,) = generate(llm, [request])
            assert_same(alone, answer)

    @pytest.mark.parametrize("method", ["msdg", "hiprune", "visionzip", "cls_attention"])
    def test_a_method_that_reads_the_encoder_is_refused(self, llm: Any, method: str) -> None:
        with pytest.raises(RequestError, match=r"only projected tokens are known.*'divprune'"):
            generate(llm, [self.ask(picture_of("wide"), retention=0.2, method=method)])

    def test_encoder_cuda_graphs_stay_off(self, llm: Any) -> None:
        assert llm.apply_model(encoder_graph_modalities) == [[]]

    def test_unpruned_is_stock_vllm_to_the_bit(self, llm: Any, folder: Path) -> None:
        pictures = [picture_of(kind, 50) for kind in self.served_whole]
        plain = [self.ask(picture) for picture in pictures]
        answers, hashes = stock_answers(folder, plain, **{**self.options, "max_num_seqs": 1})
        forget(llm)
        requests = [self.ask(picture, retention=1.0) for picture in pictures]
        assert [image_hashes(llm, request) for request in requests] == hashes
        assert [generate(llm, [request])[0] for request in requests] == answers

    def test_a_second_question_needs_no_encoder(self, llm: Any) -> None:
        pictures = [picture_of("wide", 21), picture_of("tall", 22)]
        seconds = [
            self.ask(*pictures[::-1], retention=0.1, method="cdpruner", query="Read the sign."),
            self.ask(pictures[1], retention=0.05),
        ]
        assert_encoded_once(llm, self.ask(*pictures, retention=0.2), seconds)

    def test_an_explanation_shows_the_grid_of_tokens_and_the_picture(
        self, llm: Any, oracle: ProjectedOracle
    ) -> None:
        pictures = [picture_of("tall", 4), picture_of("wide", 5)]
        wishes = PruningRequest(retention=0.2, explanation=4711)
        request = {**self.ask(*pictures), "mm_processor_kwargs": {"pruning": wishes}}
        generate(llm, [request], max_tokens=1)
        (tiles,) = llm.apply_model(partial(explained, key=4711))
        for picture, tile in zip(pictures, tiles, strict=True):
            rows, columns, _ = oracle.grid_of(picture).shape
            assert tuple(tile["grid"]) == (rows, columns)
            assert len(tile["kept"]) == int(rows * columns * 0.2 + 0.5)
            seen = tile["picture"]
            size = seen["width"], seen["height"]
            shown = np.frombuffer(seen["pixels"], np.uint8).reshape(*size[::-1], 3).astype(float)
            # Its gradient from left to right and its shapes; not the noise, which is scaled away.
            upright, turned = (
                np.abs(np.asarray(one.resize(size), dtype=float) - shown).mean()
                for one in (picture, picture.transpose(Image.Transpose.ROTATE_180))
            )
            assert upright < turned / 2

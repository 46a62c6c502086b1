"""InternVL in its own format on the real engine; test_internvl.py has the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from vllm.transformers_utils.processors.internvl import image_to_pixel_values_internvl

from tests.engine.generation import (
    Request,
    assert_same,
    generate,
    image_hashes,
    processor_kwargs,
    running_engine,
    stock_answers,
)
from tests.engine.internvl_oracle import InternVLOracle
from tests.internvl_checkpoint import SIDE, make_internvl, make_internvl_chat
from tests.pictures import SIZES, picture_of

QUESTION = "Is there a blue circle in the picture?"
OPTIONS = {"max_num_batched_tokens": 40, "trust_remote_code": True}


class ChatOracle(InternVLOracle):
    """The same weights in Hugging Face's classes, with the tiles of the other format."""

    def tiles(self, image: Image.Image) -> torch.Tensor:
        return image_to_pixel_values_internvl(
            image, input_size=SIDE, min_num=1, max_num=6, use_thumbnail=True
        )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_internvl(tmp_path_factory.mktemp("internvl"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    return make_internvl_chat(tmp_path_factory.mktemp("internvl_chat"), source)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    with running_engine(folder, **OPTIONS) as engine:
        yield engine


def ask(picture: Image.Image, **wishes: Any) -> Request:
    """A question about an image; the query is named, so that no template has to be read."""
    if wishes:
        wishes["query"] = QUESTION
    return {
        "prompt": f"<s>user\n<image>\n{QUESTION}</s>assistant\n",
        "multi_modal_data": {"image": [picture]},
        "mm_processor_kwargs": processor_kwargs(wishes),
    }


def test_pruned_images_equal_hugging_face(llm: Any, source: Path) -> None:
    oracle = ChatOracle(source)
    pictures = [picture_of(kind, seed) for seed, kind in enumerate(SIZES)]
    cases: list[tuple[Any, float, str]] = [
        (picture, retention, "msdg")
        for picture, retention in zip(pictures, (0.05, 0.4, 0.05, 0.4, 0.4), strict=True)
    ]
    # Scaled updates and the attention of the class token are read off other modules here.
    cases += [(pictures[1], 0.2, "representation_shift"), (pictures[1], 0.2, "cls_attention")]
    answers = generate(
        llm,
        [ask(picture, retention=retention, method=method) for picture, retention, method in cases],
    )
    prompt = f"<s>user\n<IMG_CONTEXT>\n{QUESTION}</s>assistant\n"
    for (picture, retention, method), answer in zip(cases, answers, strict=True):
        assert_same(answer, oracle.generate(prompt, [picture], QUESTION, retention, method))


def test_unpruned_is_stock_vllm_to_the_bit(llm: Any, folder: Path) -> None:
    pictures = [picture_of(kind, 50) for kind in SIZES]
    plain = [ask(picture) for picture in pictures]
    expected, hashes = stock_answers(folder, plain, **{**OPTIONS, "max_num_seqs": 1})
    requests = [ask(picture, retention=1.0) for picture in pictures]
    assert [image_hashes(llm, request) for request in requests] == hashes
    assert [generate(llm, [request])[0] for request in requests] == expected

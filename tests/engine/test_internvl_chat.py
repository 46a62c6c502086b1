"""InternVL in its own format on the real engine; test_internvl.py has the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from vllm.transformers_utils.processors.internvl import image_to_pixel_values_internvl

from tests.engine.generation import assert_same, generate, processor_kwargs, running_engine
from tests.engine.internvl_oracle import InternVLOracle
from tests.internvl_checkpoint import SIDE, make_internvl, make_internvl_chat
from tests.pictures import SIZES, picture_of

QUESTION = "Is there a blue circle in the picture?"


class ChatOracle(InternVLOracle):
    """The same weights in Hugging Face's classes, with the tiles of the other format."""

    def tiles(self, image: Image.Image) -> torch.Tensor:
        return image_to_pixel_values_internvl(
            image, input_size=SIDE, min_num=1, max_num=6, use_thumbnail=True
        )


def test_pruned_images_equal_hugging_face(tmp_path_factory: pytest.TempPathFactory) -> None:
    source: Path = make_internvl(tmp_path_factory.mktemp("internvl"))
    folder = make_internvl_chat(tmp_path_factory.mktemp("internvl_chat"), source)
    oracle = ChatOracle(source)
    pictures = [picture_of(kind, seed) for seed, kind in enumerate(SIZES)]
    cases: list[tuple[Any, float, str]] = [
        (picture, retention, "msdg") for picture in pictures for retention in (0.05, 0.4)
    ]
    # Scaled updates and the attention of the class token are read off other modules here.
    cases += [(pictures[1], 0.2, "representation_shift"), (pictures[1], 0.2, "cls_attention")]
    requests = [
        {
            "prompt": f"<s>user\n<image>\n{QUESTION}</s>assistant\n",
            "multi_modal_data": {"image": [picture]},
            "mm_processor_kwargs": processor_kwargs(
                {"retention": retention, "method": method, "query": QUESTION}
            ),
        }
        for picture, retention, method in cases
    ]
    with running_engine(folder, max_num_batched_tokens=40, trust_remote_code=True) as llm:
        answers = generate(llm, requests)
    prompt = f"<s>user\n<IMG_CONTEXT>\n{QUESTION}</s>assistant\n"
    for (picture, retention, method), answer in zip(cases, answers, strict=True):
        assert_same(answer, oracle.generate(prompt, [picture], QUESTION, retention, method))

"""Gemma 3 on the real engine: pruned by its projected tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, Gemma3ForConditionalGeneration

from msdg_vllm.core.errors import RequestError
from tests.engine.generation import generate, running_engine
from tests.engine.projected_family import OPTIONS, ProjectedFamily
from tests.engine.projected_oracle import ProjectedOracle
from tests.gemma3_checkpoint import IMAGE_TOKENS, make_gemma3
from tests.pictures import picture_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma3(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> ProjectedOracle:
    model: Any = Gemma3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder)

    def grid_of(image: Image.Image) -> torch.Tensor:
        pixels = processor.image_processor(image, return_tensors="pt")["pixel_values"]
        (rows,) = model.model.get_image_features(pixels).pooler_output
        side = math.isqrt(len(rows))
        return torch.as_tensor(rows).unflatten(0, (side, side))

    # vLLM's attention on a CPU is causal within images too, as the language model alone is.
    return ProjectedOracle(grid_of, processor.tokenizer, model.model.language_model, model.lm_head)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    with running_engine(folder, **OPTIONS) as engine:
        yield engine


class TestGemma3(ProjectedFamily):
    placeholder = IMAGE_TOKENS["boi_token"]
    around = ("\n\n<start_of_image>", "<end_of_image>\n\n")
    image_seeds = (0, 1, 2, 11, 4)
    hit_wishes = (0.5, 33)

    def test_an_image_with_text_between_its_crops_is_refused(self, llm: Any) -> None:
        request: Any = self.ask(picture_of("huge"), retention=0.2)
        request["mm_processor_kwargs"]["do_pan_and_scan"] = True
        with pytest.raises(RequestError, match=r"image 0.*text between its tokens"):
            generate(llm, [request])

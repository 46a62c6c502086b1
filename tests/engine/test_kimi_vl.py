"""Kimi-VL on the real engine: pruned by its projected tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, DeepseekV2ForCausalLM

from tests.engine.generation import running_engine
from tests.engine.projected_family import OPTIONS, ProjectedFamily
from tests.engine.projected_oracle import ProjectedOracle
from tests.kimi_vl_checkpoint import PLACEHOLDER, make_kimi_vl, make_towers

KIMI_OPTIONS = {
    **OPTIONS,
    "trust_remote_code": True,
    # vLLM's own for CPUs turns queries that are a part of wider rows by wrong angles.
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_kimi_vl(tmp_path_factory.mktemp("kimi_vl"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> ProjectedOracle:
    tower, projector = make_towers()
    weights = torch.load(folder / "towers.pt")
    tower.load_state_dict(weights["tower"])
    projector.load_state_dict(weights["projector"])
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    language_model: Any = DeepseekV2ForCausalLM.from_pretrained(
        folder / "language_model", dtype=torch.float32
    ).eval()

    def grid_of(image: Image.Image) -> torch.Tensor:
        inputs = processor.image_processor.preprocess(image)
        grid = torch.cat([torch.ones(1, 1, dtype=torch.int64), inputs["image_grid_hws"]], dim=1)
        merged = tower(inputs["pixel_values"], grid_thw=grid).pooler_output
        _, height, width = grid[0].tolist()
        return torch.as_tensor(projector(merged)).reshape(height // 2, width // 2, -1)

    return ProjectedOracle(
        grid_of, processor.tokenizer, language_model.model, language_model.lm_head
    )


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        # vLLM's latent attention on a CPU knows neither chunks nor prefixes.
        patch.setenv("VLLM_MLA_DISABLE", "1")
        with running_engine(folder, **KIMI_OPTIONS) as engine:
            yield engine


class TestKimiVL(ProjectedFamily):
    options = KIMI_OPTIONS
    placeholder = PLACEHOLDER
    around = ("", "")
    # Rounding up gives the huge one more tokens than vLLM plans for, and it refuses that.
    served_whole = ("square", "wide", "tall", "tiny")

"""Pruning with plain transformers: the tokens of the literal reference, stock answers at 1.0."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from benchmarks.quality.inference import SceneModel, load_model
from examples import transformers_llava, transformers_qwen2_5_vl
from msdg_vllm.core import num_kept_tokens
from tests.reference import select_reference

ROOT = Path(__file__).parents[3]
EXAMPLES = {"scenes-llava": transformers_llava, "scenes-qwen": transformers_qwen2_5_vl}
QUESTIONS: dict[str, list[str]] = json.loads((ROOT / "examples" / "questions.json").read_text())
RETENTION = 0.111


@pytest.fixture(scope="module", params=EXAMPLES)
def seer(request: pytest.FixtureRequest) -> SceneModel:
    """The bundled model with its states laid open by other code than the example's."""
    return load_model(ROOT / "models" / request.param)


@pytest.fixture(scope="module")
def example(seer: SceneModel) -> ModuleType:
    return EXAMPLES[seer.folder.name]


@pytest.fixture(scope="module")
def stock(seer: SceneModel) -> tuple[Any, Any]:
    model = AutoModelForImageTextToText.from_pretrained(seer.folder, dtype=torch.float32)
    return model.eval(), AutoProcessor.from_pretrained(seer.folder)


def picture(name: str) -> Image.Image:
    return Image.open(ROOT / "examples" / name).convert("RGB")


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_kept_tokens_are_those_of_the_literal_reference(
    seer: SceneModel, example: ModuleType, stock: tuple[Any, Any], name: str
) -> None:
    (seen,) = seer.see([picture(name)])
    budget = num_kept_tokens(len(seen.visual), RETENTION)
    question = QUESTIONS[name][0]
    _, keep = example.ask(*stock, seer.profile, picture(name), question, RETENTION)
    expected = select_reference(
        {layer: seen.states[layer].numpy() for layer in seer.profile.layers},
        seen.visual.numpy(),
        seer.embed(question).detach().numpy(),
        budget,
        seer.profile,
        seer.patches_per_token,
    )
    assert keep.tolist() == expected.keep


def test_retention_1_is_stock_transformers(
    seer: SceneModel, example: ModuleType, stock: tuple[Any, Any]
) -> None:
    model, processor = stock
    for name, (question, *_) in QUESTIONS.items():
        answer, keep = example.ask(*stock, seer.profile, picture(name), question, 1.0)
        parts = [{"type": "image"}, {"type": "text", "text": question}]
        chat = processor.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True
        )
        inputs = processor(images=picture(name), text=chat, return_tensors="pt")
        assert len(keep) == (inputs.input_ids == model.config.image_token_id).sum()
        said = model.generate(**inputs, do_sample=False, max_new_tokens=64)
        whole = processor.decode(said[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        assert answer == whole.strip()


def test_it_runs_where_there_is_no_vllm_and_answers_as_the_readme_says(example: ModuleType) -> None:
    # None in the place of a module makes its import fail.
    code = (
        f"import sys, runpy; sys.modules['vllm'] = None; sys.argv = ['example']; "
        f"runpy.run_path({example.__file__!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answer, kept = done.stdout.splitlines()
    assert answer == "EH9"
    assert kept.startswith("16 visual tokens: ")

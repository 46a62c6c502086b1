"""Each bundled model is the one that was committed, loads as it is, and answers."""

from fractions import Fraction
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from benchmarks.quality.ablate import run_trials
from benchmarks.quality.cases import scene_ids
from benchmarks.quality.drawing import draw_scene
from benchmarks.quality.fine import FINE, AnySplit
from benchmarks.quality.inference import PROFILE, Row, SceneModel, load_model
from benchmarks.quality.questions import ask_one_of_each
from benchmarks.quality.scenes import sample_scene
from benchmarks.quality.variants import OURS
from msdg_vllm.calibration.loading import load_tower
from msdg_vllm.core.profiles import EncoderProfile
from training.evaluate import pruned_settings
from training.export import HASHES, MODELS, WEIGHTS, sha256
from training.families import FAMILIES
from training.pool import question_tokens


@pytest.fixture(scope="module", params=sorted(p.parent.name for p in MODELS.glob("*/config.json")))
def folder(request) -> Path:
    return MODELS / request.param


@pytest.fixture(scope="module")
def model(folder) -> SceneModel:
    return load_model(folder)


def _chat(processor, question):
    parts = [{"type": "image"}, {"type": "text", "text": question.text}]
    messages = [{"role": "user", "content": parts}]
    return processor.apply_chat_template(messages, add_generation_prompt=True)


def test_weights_are_those_of_the_hash_file_and_small(folder):
    listed, name = (folder / HASHES).read_text().split()
    assert name == WEIGHTS
    assert sha256(folder / WEIGHTS) == listed
    assert (folder / WEIGHTS).stat().st_size <= 12_000_000


def test_every_weight_is_used_and_none_is_missing(folder):
    _, loading = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert not loading["mismatched_keys"]


def test_the_processor_makes_one_placeholder_per_visual_token(folder, model):
    family = FAMILIES[folder.name.removeprefix("scenes-")]
    for size in ((192, 192), (400, 100), (30, 90), (3, 2)):
        picture = draw_scene(sample_scene(0, "test")).resize(size)
        text = f"{family.opening}{model.processor.image_token}{family.closing}\nHello\n"
        inputs = model.processor(images=picture, text=text, return_tensors="pt")
        rows, columns = family.canvas.form(*size)
        assert (inputs.input_ids == model.model.config.image_token_id).sum() == rows * columns
        (seen,) = model.see([picture])
        assert len(seen.visual) == rows * columns


def test_a_chat_request_has_the_tokens_of_training(folder):
    family = FAMILIES[folder.name.removeprefix("scenes-")]
    processor = AutoProcessor.from_pretrained(folder)
    for question in ask_one_of_each(sample_scene(1, "test")):
        rendered = AutoTokenizer.from_pretrained(folder)(_chat(processor, question)).input_ids
        tokens, prompt = question_tokens(processor.tokenizer, question.text, question.answer)
        picture = f"{family.opening}{processor.image_token}{family.closing}"
        assert rendered == processor.tokenizer(picture).input_ids + tokens[:prompt]


def test_the_profile_names_layers_the_tower_has(model):
    profile = EncoderProfile.load(model.folder / PROFILE)
    assert max(profile.layers) <= model.output_layer  # nobody reads what comes after
    assert profile.features_layer == model.output_layer
    assert profile.sink_layer is None
    assert profile.provenance is not None
    assert profile.provenance["model"] == model.folder.name
    assert profile.provenance["encoder"]["sha256"] == load_tower(str(model.folder)).info.digest


@torch.inference_mode()
def test_generation_says_what_evaluation_counts(model):
    """Greedy decoding through transformers' own path agrees with the teacher-forced count."""
    scene = sample_scene(7, "test")
    questions = ask_one_of_each(scene)
    (seen,) = model.see([draw_scene(scene)])
    everything = torch.arange(len(seen.visual))
    counted = model.right([Row(seen, everything, question) for question in questions])
    for question, right in zip(questions, counted, strict=True):
        inputs = model.processor(
            images=draw_scene(scene), text=_chat(model.processor, question), return_tensors="pt"
        )
        output = model.model.generate(**inputs)[0, inputs.input_ids.shape[1] :]
        said = model.processor.tokenizer.decode(output, skip_special_tokens=True)
        assert (said == question.answer) == right


def test_it_answers_scenes_it_was_never_shown(model):
    ours = {OURS: (pruned_settings(model)[OURS][0], {Fraction(1, 3)})}
    split: AnySplit = FINE if model.folder.name == "scenes-fine" else "test"
    marks = run_trials(model, scene_ids([split], 1, 64), ours)
    right = [mark.right for mark in marks if mark.name == OURS]
    assert sum(right) / len(right) > 0.88

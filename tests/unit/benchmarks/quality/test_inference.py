"""What runs in this process is what transformers computes by itself, for both families."""

from fractions import Fraction

import pytest
import torch
from transformers import AutoModelForImageTextToText

from benchmarks.quality.ablate import run_trials, select
from benchmarks.quality.cases import SceneId, scene_ids
from benchmarks.quality.drawing import draw_scene
from benchmarks.quality.inference import Row, load_model
from benchmarks.quality.questions import Question
from benchmarks.quality.variants import OURS, Variant, ablations
from benchmarks.shared.provenance import ROOT
from msdg_vllm.core import analyze_image, select_tokens
from tests.qwen_checkpoint import make_qwen2_5_vl

NINTH = Fraction(1, 9)
LLAVA = ROOT / "models" / "scenes-llava"


@pytest.fixture(scope="module", params=["llava", "qwen"])
def model(request, tmp_path_factory):
    if request.param == "llava":
        return load_model(LLAVA)
    return load_model(make_qwen2_5_vl(tmp_path_factory.mktemp("qwen")))


def _picture():
    # Wider than high, so that rows and columns cannot be mixed up unnoticed.
    return draw_scene(SceneId("test", 0, 3).scene()).resize((256, 168))


def _chat(model, question):
    parts = [{"type": "image"}, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": parts}]
    return model.processor.apply_chat_template(messages, add_generation_prompt=True)


@torch.inference_mode()
def test_all_tokens_kept_is_transformers_own_answer(model):
    """The token that stock transformers finds most likely is right, every other one wrong."""
    picture, question = _picture(), "Is there a sign?"
    stock = AutoModelForImageTextToText.from_pretrained(model.folder, dtype=torch.float32).eval()
    inputs = model.processor(images=picture, text=_chat(model, question), return_tensors="pt")
    first = int(stock(**inputs).logits[0, -1].argmax())
    (seen,) = model.see([picture])
    row = Row(seen, torch.arange(len(seen.visual)), Question("presence", question, ""))
    for token, is_right in ((first, True), ((first + 1) % len(model.tokenizer), False)):
        # An empty answer ends at once: its only token is the one that ends it.
        model.tokenizer.eos_token = model.tokenizer.convert_ids_to_tokens(token)
        assert model.right([row]) == [is_right]


@torch.inference_mode()
def test_a_batch_answers_as_each_row_alone(model):
    scene = SceneId("test", 0, 1)
    (seen,) = model.see([draw_scene(scene.scene())])
    everything = torch.arange(len(seen.visual))
    rows = [
        Row(seen, everything[:: number + 1], question)
        for number, question in enumerate(scene.questions())
    ]
    assert model.right(rows) == [model.right([row])[0] for row in rows]


@torch.inference_mode()
def test_selection_is_that_of_the_core_question_by_question(model):
    scene = SceneId("test", 0, 2)
    (seen,) = model.see([draw_scene(scene.scene())])
    questions = scene.questions()
    kept = select(model, seen, questions, Variant(OURS, OURS, model.profile), [NINTH])[NINTH]
    states = {layer: seen.states[layer] for layer in model.profile.layers}
    signals = analyze_image(states, model.profile, model.patches_per_token)
    for question, indices in zip(questions, kept, strict=True):
        query = model.embed(question.text)
        alone = select_tokens(signals, seen.visual, query, len(indices))
        assert indices.tolist() == alone.tolist()


@torch.inference_mode()
def test_attention_adds_up(model):
    """What all patches receive is what one query gives, but for the class token's share."""
    (seen,) = model.see([_picture()])
    assert seen.attention.shape == seen.states[0].shape[:1]
    assert seen.attention.min() >= 0
    assert 0.3 < float(seen.attention.sum()) < 1.0001


@torch.inference_mode()
def test_qwens_states_follow_the_picture_row_by_row(tmp_path):
    """Swapping the two halves of a picture swaps the patches that enter the tower."""
    model = load_model(make_qwen2_5_vl(tmp_path))
    picture = _picture().resize((280, 168))
    swapped = picture.copy()
    swapped.paste(picture.crop((0, 0, 140, 168)), (140, 0))
    swapped.paste(picture.crop((140, 0, 280, 168)), (0, 0))
    first, second = model.see([picture, swapped])
    rows, columns = first.grid
    assert (rows, columns) == (6, 10)
    entering = [seen.states[0].view(rows, columns, 4, -1) for seen in (first, second)]
    torch.testing.assert_close(entering[0].roll(columns // 2, dims=1), entering[1])


def test_every_question_is_marked_in_every_setting(model):
    scenes = scene_ids(["test"], 1, 2)
    settings = {
        variant.name: (variant, {NINTH})
        for variant in ablations(model.profile, model.num_layers)[0].variants
    }
    marks = run_trials(model, scenes, settings)
    num_questions = sum(len(scene.questions()) for scene in scenes)
    assert len(marks) == num_questions * (1 + len(settings))

"""Fine scenes: large pictures in which items keep their own size."""

from itertools import combinations

import numpy as np
import pytest

from benchmarks.quality.cases import SceneId
from benchmarks.quality.drawing import draw_scene
from benchmarks.quality.fine import GRIDS, TOKEN_SIDE, sample_fine
from benchmarks.quality.questions import FINE_KINDS, ask
from benchmarks.quality.scenes import Item, Scene

NUMBERS = range(60)


def test_the_same_number_gives_the_same_scene_and_no_seed_is_trained_on():
    assert [sample_fine(number) for number in NUMBERS] == [sample_fine(n) for n in NUMBERS]
    trained = {sample_fine(number, training=True).seed for number in NUMBERS}
    assert trained.isdisjoint(sample_fine(number).seed for number in NUMBERS)


def test_items_keep_their_size_whatever_the_size_of_the_picture():
    scenes = [sample_fine(number) for number in NUMBERS]
    sizes = {(scene.height // TOKEN_SIDE, scene.width // TOKEN_SIDE) for scene in scenes}
    assert sizes == set(GRIDS)
    for scene in scenes:
        assert all(9 <= shape.width * scene.width <= 14 for shape in scene.shapes)
        assert all(sign.height * scene.height == pytest.approx(12) for sign in scene.signs)
        for one, other in combinations(scene.items, 2):
            apart = abs(one.x - other.x) > (one.width + other.width) / 2
            assert apart or abs(one.y - other.y) > (one.height + other.height) / 2


def test_some_pictures_of_the_training_are_scaled_down_and_show_the_same():
    scenes = [sample_fine(number, training=True) for number in NUMBERS]
    scaled = [scene for scene in scenes if scene.sides != (scene.width, scene.height)]
    assert 0.15 < len(scaled) / len(scenes) < 0.45
    for scene in scaled:
        assert draw_scene(scene).size == (scene.width, scene.height)


def test_a_faint_item_lets_the_background_through():
    def drawn(opacity: float) -> np.ndarray:
        item = Item("red", "square", "", 0.5, 0.5, 14 / 96, 14 / 96, opacity)
        picture = draw_scene(Scene(1, 96, 96, (item,), (96, 96)))
        return np.asarray(picture.crop((45, 45, 51, 51)), dtype=float).mean(axis=(0, 1))

    solid, faint, gone = drawn(1.0), drawn(0.5), drawn(0.0)
    assert np.allclose(faint, (solid + gone) / 2, atol=2)
    assert abs(solid - gone).max() > 40


def test_two_things_are_named_and_both_must_be_there():
    answers = []
    for number in NUMBERS:
        scene = sample_fine(number)
        question = ask(scene, "both", np.random.default_rng(number))
        if question is None:
            continue
        shown = {f"{item.color} {item.name}" for item in scene.items}
        one, other = question.text.removeprefix("Is there ").removesuffix("?").split(" and ")
        named = {noun.split(" ", 1)[1] for noun in (one, other)}
        assert len(named) == 2
        assert question.answer == ("yes" if named <= shown else "no")
        assert named & shown  # at least one is there
        answers.append(question.answer)
    assert 0.3 < answers.count("yes") / len(answers) < 0.7


def test_fine_scenes_are_asked_one_question_more():
    kinds = {q.kind for n in NUMBERS for q in SceneId("fine", 0, n).questions()}
    assert kinds == set(FINE_KINDS)

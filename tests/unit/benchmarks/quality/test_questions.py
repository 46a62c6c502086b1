"""Answers are right: a second reader parses each question and answers it from the scene."""

import re

import numpy as np
import pytest

from benchmarks.quality.questions import KINDS, LETTERS, ask, ask_one_of_each
from benchmarks.quality.scenes import COLORS, HELD_OUT_PAIRS, SHAPES, sample_scene

NUMBERS = range(250)


def _matching(scene, phrase):
    """Items meant by "red circle", "circle", "circles", "red shapes", "sign" and the like."""
    found = list(scene.items)
    for word in phrase.split():
        if word in COLORS:
            found = [item for item in found if item.color == word]
        elif word in ("shape", "shapes"):
            found = [item for item in found if item.name in SHAPES]
        else:
            singular = word if word in (*SHAPES, "sign") else re.sub("(?<=cross)es$|s$", "", word)
            found = [item for item in found if item.name == singular]
    return found


def _only(scene, phrase):
    (item,) = _matching(scene, phrase)
    return item


def _second_opinion(scene, text):
    if "\n" in text:
        question, *options, last = text.split("\n")
        assert last == "Answer with the letter."
        matches = [re.fullmatch(r"[A-D]\. (.+)", option) for option in options]
        assert all(matches)
        words = [match[1] for match in matches if match]
        if question.startswith("Which of these"):
            right = [word for word in words if _matching(scene, word)]
        else:
            right = [word for word in words if word == _second_opinion(scene, question)]
        (answer,) = right
        return LETTERS[words.index(answer)]
    if found := re.match(r"(?:Is there|Can you see) an? ([a-z ]+?)(?: in the \w+)?\?$", text):
        return "yes" if _matching(scene, found[1]) else "no"
    if found := re.match(r"What (?:colou?r is|is the colou?r of) the (\w+)\?$", text):
        return _only(scene, found[1]).color
    if found := re.match(r"(?:What|Which) shape is (\w+)\?$", text):
        return _only(scene, f"{found[1]} shape").name
    if found := re.match(r"How many ([a-z ]+?) (?:are|can) ", text):
        return str(len(_matching(scene, found[1])))
    if found := re.match(r"Is the ([a-z ]+?) (left or right of|above or below) the (.+)\?$", text):
        one, other = _only(scene, found[1]), _only(scene, found[3])
        if found[2] == "above or below":
            return "above" if one.y < other.y else "below"
        return "left" if one.x < other.x else "right"
    if found := re.match(
        r"Is the ([a-z ]+?) (to the left of|to the right of|above|below) the (.+)\?$", text
    ):
        one, other = _only(scene, found[1]), _only(scene, found[3])
        holds = {
            "to the left of": one.x < other.x,
            "to the right of": one.x > other.x,
            "above": one.y < other.y,
            "below": one.y > other.y,
        }[found[2]]
        return "yes" if holds else "no"
    found = re.search(r"the ([a-z ]*sign)", text)
    assert found
    return _only(scene, found[1]).code


@pytest.mark.parametrize("split", ["train", "test", "held_out"])
def test_answers_agree_with_a_second_reader(split):
    asked = 0
    for number in NUMBERS:
        scene = sample_scene(number, split)
        for question in ask_one_of_each(scene):
            assert _second_opinion(scene, question.text) == question.answer, (scene, question)
            asked += 1
    assert asked > 5 * len(NUMBERS)


def test_questions_depend_on_the_scene_and_seed_alone():
    scene = sample_scene(5)
    assert ask_one_of_each(scene, 1) == ask_one_of_each(scene, 1)
    assert ask_one_of_each(scene, 1) != ask_one_of_each(scene, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_no_answer_can_be_guessed_most_of_the_time(kind):
    rng = np.random.default_rng(0)
    asked = [ask(sample_scene(number), kind, rng) for number in range(600)]
    answers = [question.answer for question in asked if question is not None]
    assert len(answers) > 400
    most_common = max(answers.count(answer) for answer in set(answers))
    assert most_common < 0.55 * len(answers)


def test_held_out_pairs_are_never_named_in_training():
    names = [" ".join(pair) for pair in HELD_OUT_PAIRS]
    for number in NUMBERS:
        for question in ask_one_of_each(sample_scene(number, "train")):
            assert not any(name in question.text for name in names)


def test_a_scene_without_signs_has_nothing_to_read():
    scene = next(s for s in map(sample_scene, range(100)) if not s.signs)
    assert ask(scene, "reading", np.random.default_rng(0)) is None

"""Which questions are asked."""

from fractions import Fraction

import pytest

from benchmarks.quality.cases import parse_retention, scene_ids


def test_seeds_and_splits_share_no_picture():
    ids = scene_ids(["test", "held_out"], 3, 20)
    assert len({scene.scene().seed for scene in ids}) == len(ids) == 120


def test_a_scene_is_asked_at_most_one_question_of_a_kind():
    for scene in scene_ids(["test"], 1, 20):
        kinds = [question.kind for question in scene.questions()]
        assert len(set(kinds)) == len(kinds) >= 4


def test_retentions_are_exact():
    assert parse_retention("2/9") == Fraction(2, 9)
    assert parse_retention("0.5") == Fraction(1, 2)


@pytest.mark.parametrize("text", ["0", "1.5", "-1/9", "1/0", "most"])
def test_what_is_no_retention_is_refused(text):
    with pytest.raises(ValueError, match="retention must be in"):
        parse_retention(text)

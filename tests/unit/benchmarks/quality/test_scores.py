"""Accuracy, relative accuracy and intervals against numbers worked out by hand."""

import math

import numpy as np
import pytest

from benchmarks.quality.scores import (
    accuracy_by_kind,
    estimate,
    overall_accuracy,
    relative_accuracy,
    resample,
)

NAN = math.nan
# Three scenes, two kinds; the second scene has no question of the second kind.
RIGHT = np.array([[1, 0], [1, NAN], [0, 1]])


def test_a_kind_that_a_scene_cannot_be_asked_counts_neither_way():
    assert accuracy_by_kind(RIGHT, np.ones((1, 3))) == pytest.approx(np.array([[2 / 3, 1 / 2]]))
    assert overall_accuracy(RIGHT, np.ones((1, 3))) == pytest.approx([3 / 5])


def test_a_scene_drawn_twice_counts_twice():
    drawn = np.array([[2, 1, 0]])
    assert accuracy_by_kind(RIGHT, drawn) == pytest.approx(np.array([[1, 0]]))
    assert overall_accuracy(RIGHT, drawn) == pytest.approx([3 / 5])


def test_relative_accuracy_is_the_mean_of_ratios_not_the_ratio_of_means():
    relative = relative_accuracy(np.array([[0.9, 0.1]]), np.array([[0.9, 0.4]]))
    assert relative == pytest.approx([(1 + 0.25) / 2])


def test_a_kind_the_unpruned_model_never_answers_is_left_out():
    accuracy, unpruned = np.array([[0.5, 0.3, 0.2]]), np.array([[1.0, 0.0, NAN]])
    assert relative_accuracy(accuracy, unpruned) == pytest.approx([0.5])
    assert np.isnan(relative_accuracy(accuracy, np.zeros((1, 3)))).all()


def test_the_interval_of_a_share_is_that_of_the_binomial():
    right = np.array([[1.0]] * 160 + [[0.0]] * 40)
    found = estimate(overall_accuracy(right, resample(len(right))))
    half = 1.96 * math.sqrt(0.8 * 0.2 / len(right))
    assert found.value == pytest.approx(0.8)
    assert found.low == pytest.approx(0.8 - half, abs=0.01)
    assert found.high == pytest.approx(0.8 + half, abs=0.01)


def test_questions_about_one_scene_are_not_independent():
    """Six equal answers about each scene say no more than one of them."""
    scenes = np.array([[1.0]] * 30 + [[0.0]] * 20)
    once = estimate(overall_accuracy(scenes, resample(50)))
    six_times = estimate(overall_accuracy(np.repeat(scenes, 6, axis=1), resample(50)))
    assert six_times == once


def test_what_two_methods_have_in_common_cancels_in_their_difference():
    rng = np.random.default_rng(0)
    one = rng.integers(0, 2, size=(100, 1)).astype(float)
    other = one.copy()
    other[np.flatnonzero(one[:, 0])[:5]] = 0.0
    weights = resample(100)
    shares = [overall_accuracy(right, weights) for right in (one, other)]
    alone, paired = estimate(shares[0]), estimate(shares[0] - shares[1])
    assert paired.value == pytest.approx(0.05)
    assert paired.low is not None
    assert paired.high is not None
    assert alone.low is not None
    assert alone.high is not None
    assert paired.low > 0
    assert paired.high - paired.low < (alone.high - alone.low) / 2


def test_nothing_measured_is_no_number():
    assert estimate(np.full(5, NAN)).value is None

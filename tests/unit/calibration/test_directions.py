"""Retrieval by representation: the paper's protocol, and AP by its definition."""

import numpy as np

from msdg_vllm.calibration.directions import average_precisions, early_layers, representations
from msdg_vllm.calibration.masks import Annotation
from tests.unit.calibration.towers import SIDE, SyntheticTower, picture


def annotation_of(labels: np.ndarray, cover: np.ndarray | None = None) -> Annotation:
    cover = np.ones(labels.size, np.float32) if cover is None else cover
    return Annotation(np.zeros((0, labels.size), np.float32), cover, labels.reshape(-1))


def test_a_class_of_its_own_direction_is_found_and_a_mixed_one_is_not() -> None:
    labels = np.repeat([0, 1], 32)
    clear = np.eye(2)[labels]
    mixed = np.random.default_rng(0).normal(size=(64, 8))
    mixed /= np.linalg.norm(mixed, axis=1, keepdims=True)
    scores, chance, anchors = average_precisions(
        {"clear": clear, "mixed": mixed}, annotation_of(labels), (8, 8)
    )
    assert scores["clear"] == 1.0
    assert 0.3 < scores["mixed"] < 0.75
    assert (round(chance, 2), anchors) == (0.49, 2)


def test_average_precision_is_the_mean_precision_at_each_hit() -> None:
    # The anchor is token 0; eight tokens of its class, ranked by hand.
    labels = np.array([0] * 8 + [1] * 4)
    cover = np.where(np.arange(12) == 0, 1.0, 0.6).astype(np.float32)
    angles = np.array([0, 1, 2, 5, 6, 7, 8, 9, 3, 4, 10, 11]) / 20
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    scores, _, anchors = average_precisions({"x": vectors}, annotation_of(labels, cover), (1, 12))
    expected = np.mean([1 / 1, 2 / 2, 3 / 5, 4 / 6, 5 / 7, 6 / 8, 7 / 9])
    assert anchors == 1
    assert np.isclose(scores["x"], expected)


def test_classes_of_fewer_than_eight_tokens_have_no_anchor() -> None:
    scores, _, anchors = average_precisions(
        {"x": np.ones((12, 2))}, annotation_of(np.array([0] * 7 + [1] * 5)), (3, 4)
    )
    assert anchors == 0
    assert np.isnan(scores["x"])


def test_representations_are_unit_vectors_of_tokens() -> None:
    tower = SyntheticTower()
    encoded = tower.encode(picture(0)[0])
    made = representations(encoded, tower.info)
    assert early_layers(tower.info) == [0, 2, 4, 6]
    assert len(made) == 6
    for vectors in made.values():
        assert vectors.shape == (SIDE**2, 64)
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)

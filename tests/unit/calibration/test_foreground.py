"""Cues that need no masks, held to plain definitions."""

import numpy as np

from msdg_vllm.calibration.foreground import (
    auc,
    border_distance,
    border_mask,
    foreground_cut,
    rank_correlation,
)


def test_auc_counts_pairs() -> None:
    scores, mask = np.array([0.1, 0.9, 0.4, 0.8, 0.2]), np.array([0, 1, 0, 1, 1], bool)
    pairs = [(a > b) for a in scores[mask] for b in scores[~mask]]
    assert auc(scores, mask) == np.mean(pairs)
    assert auc(scores, np.ones(5, bool)) == 0.5


def test_rank_correlation_sees_order_only() -> None:
    values = np.array([3.0, 1.0, 2.0, 7.0])
    assert np.isclose(rank_correlation(values, np.exp(values)), 1.0)
    assert np.isclose(rank_correlation(values, -values), -1.0)
    assert rank_correlation(values, np.ones(4)) == 0.0


def blob(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Features of two kinds, and where the inner kind is."""
    draw = np.random.default_rng(1)
    inside = np.zeros((rows, columns), bool)
    inside[rows // 4 : rows // 2, columns // 4 : columns // 2] = True
    mask = inside.reshape(-1)
    kinds = draw.normal(size=(2, 32))
    return kinds[mask.astype(int)] + 0.3 * draw.normal(size=(len(mask), 32)), mask


def test_the_cut_finds_what_is_not_at_the_border() -> None:
    for grid in ((12, 12), (40, 30)):  # the second is cut in cells
        features, mask = blob(*grid)
        found = foreground_cut(features, grid, np.ones(len(mask), bool))
        assert (found == mask).mean() > 0.93


def test_padding_is_no_part_of_the_image() -> None:
    valid = np.zeros((6, 6), bool)
    valid[1:5] = True
    assert border_mask((6, 6), valid.reshape(-1)).sum() == 24 - 8
    features, _ = blob(6, 6)
    assert len(foreground_cut(features, (6, 6), valid.reshape(-1))) == 24


def test_tokens_unlike_the_border_are_far_from_it() -> None:
    features, mask = blob(12, 12)
    distance = border_distance(features, (12, 12), np.ones(144, bool))
    assert distance[mask].min() > np.median(distance[~mask])

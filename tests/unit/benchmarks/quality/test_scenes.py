"""Scenes and pictures come from their number alone, and splits never meet."""

import numpy as np
import pytest

from benchmarks.quality.drawing import draw_scene
from benchmarks.quality.scenes import HELD_OUT_PAIRS, MAX_ITEMS, sample_scene
from training.pool import BACKGROUND, patch_owners

NUMBERS = range(300)


def _pairs(split):
    scenes = [sample_scene(number, split) for number in NUMBERS]
    return [{(item.color, item.name) for item in scene.shapes} for scene in scenes]


def test_a_scene_and_its_picture_depend_on_the_number_alone():
    for number in range(10):
        first, second = sample_scene(number), sample_scene(number)
        assert first == second
        assert draw_scene(first).tobytes() == draw_scene(second).tobytes()


def test_splits_share_no_seed():
    seeds = [{sample_scene(n, split).seed for n in NUMBERS} for split in ("train", "test")]
    assert not seeds[0] & seeds[1]


@pytest.mark.parametrize("split", ["train", "test"])
def test_held_out_pairs_are_never_drawn_for_training(split):
    assert not any(pairs & HELD_OUT_PAIRS for pairs in _pairs(split))


def test_every_held_out_scene_shows_a_held_out_pair():
    assert sum(bool(pairs & HELD_OUT_PAIRS) for pairs in _pairs("held_out")) > 0.98 * len(NUMBERS)


def test_items_lie_inside_the_picture_and_apart():
    for number in NUMBERS:
        items = sample_scene(number).items
        assert 2 <= len(items) <= MAX_ITEMS
        for place, item in enumerate(items):
            assert item.width / 2 <= item.x <= 1 - item.width / 2
            assert item.height / 2 <= item.y <= 1 - item.height / 2
            for other in items[:place]:
                apart_x = abs(item.x - other.x) > (item.width + other.width) / 2
                apart_y = abs(item.y - other.y) > (item.height + other.height) / 2
                assert apart_x or apart_y


def test_items_cover_a_minor_part_and_each_owns_a_patch():
    covered = []
    for number in NUMBERS:
        scene = sample_scene(number)
        owner = patch_owners(scene, 12)
        assert set(range(len(scene.items))) <= set(owner.tolist())
        covered.append((owner >= 0).mean())
    assert np.mean(covered) < 0.12
    assert max(covered) < 0.25


def test_patches_far_from_items_are_background():
    scene = sample_scene(3)
    owner = patch_owners(scene, 12).reshape(12, 12)
    for row in range(12):
        for column in range(12):
            x, y = (column + 0.5) / 12, (row + 0.5) / 12
            far = all(
                abs(x - item.x) > item.width / 2 + 1 / 12
                or abs(y - item.y) > item.height / 2 + 1 / 12
                for item in scene.items
            )
            if far:
                assert owner[row, column] == BACKGROUND


def test_a_negative_number_is_refused():
    with pytest.raises(ValueError, match="got -1"):
        sample_scene(-1)

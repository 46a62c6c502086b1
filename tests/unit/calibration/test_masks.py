"""Masks of every kind, brought onto tokens."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from msdg_vllm.calibration.masks import Segment, annotate, open_masks
from msdg_vllm.core.errors import CalibrationError
from tests.unit.calibration.towers import PATCH, SIDE, SyntheticTower

SIZE = (8, 6)


def test_a_folder_of_masks_has_classes_by_value(tmp_path: Path) -> None:
    values = np.zeros((6, 8), np.uint8)
    values[:2], values[2, 0], values[5] = 3, 7, 255
    Image.fromarray(values).save(tmp_path / "a.png")
    masks = open_masks(tmp_path)
    segments = masks.segments(Path("photos/a.jpg"), SIZE)
    assert segments is not None
    assert [(s.category, int(s.pixels.sum())) for s in segments] == [(3, 16), (7, 1)]
    assert masks.segments(Path("photos/b.jpg"), SIZE) is None


def coco(tmp_path: Path, annotations: list[object], **more: object) -> Path:
    path = tmp_path / "coco.json"
    images = [{"id": 1, "file_name": "a.jpg"}, {"id": 2, "file_name": "b.jpg"}]
    path.write_text(json.dumps({"images": images, "annotations": annotations, **more}))
    return path


def test_coco_instances_may_be_polygons_or_run_lengths(tmp_path: Path) -> None:
    polygon = {"image_id": 1, "category_id": 4, "segmentation": [[0, 0, 3, 0, 3, 3, 0, 3]]}
    lengths = {"size": [6, 8], "counts": [6, 12, 30]}  # column by column: the second and third
    runs = {"image_id": 1, "category_id": 5, "segmentation": lengths}
    crowd = {**runs, "iscrowd": 1}
    masks = open_masks(coco(tmp_path, [polygon, runs, crowd]))
    found = masks.segments(Path("a.jpg"), SIZE)
    assert found is not None
    assert [s.category for s in found] == [4, 5]
    assert found[0].pixels[:4, :4].all()
    assert found[0].pixels.sum() == 16
    assert found[1].pixels[:, 1:3].all()
    assert found[1].pixels.sum() == 12
    assert masks.segments(Path("b.jpg"), SIZE) == []
    assert masks.segments(Path("c.jpg"), SIZE) is None


def test_coco_panoptic_knows_things_and_stuff(tmp_path: Path) -> None:
    (tmp_path / "coco").mkdir()
    colors = np.zeros((6, 8, 3), np.uint8)
    colors[:3, :, 1] = 2  # id 512
    colors[3:, :, 0] = 9
    Image.fromarray(colors).save(tmp_path / "coco" / "a.png")
    parts = [{"id": 512, "category_id": 1}, {"id": 9, "category_id": 2}]
    annotation = {"image_id": 1, "file_name": "a.png", "segments_info": parts}
    categories = [{"id": 1, "isthing": 1}, {"id": 2, "isthing": 0}]
    masks = open_masks(coco(tmp_path, [annotation], categories=categories))
    found = masks.segments(Path("a.jpg"), SIZE)
    assert found is not None
    assert [(s.is_thing, int(s.pixels.sum())) for s in found] == [(True, 24), (False, 24)]


def test_what_is_no_mask_file_is_said_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("[]")
    with pytest.raises(CalibrationError, match="--masks must be a folder"):
        open_masks(path)


def test_a_token_has_the_class_that_covers_half_of_it() -> None:
    thing, stuff = np.zeros((2, SIDE * PATCH, SIDE * PATCH), bool)
    thing[:PATCH, : PATCH + PATCH // 2] = True
    stuff[:PATCH, PATCH + PATCH // 2 : 3 * PATCH] = True
    segments = [Segment(thing, 1, True), Segment(stuff, 2, False)]
    annotation = annotate(SyntheticTower(), segments, SIDE**2)
    assert annotation.labels[:4].tolist() == [1, 1, 2, -1]
    assert annotation.instances.shape == (1, SIDE**2)
    assert annotation.instances[0, :3].tolist() == [1.0, 0.5, 0.0]

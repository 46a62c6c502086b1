"""What is where in an image: instances and classes from masks, brought onto the token grid."""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from msdg_vllm.calibration.tower import Areas, Tower
from msdg_vllm.core.errors import CalibrationError

_LABELLED = 0.5  # a token belongs to a class that covers half of it, as in the paper
_UNLABELLED = 255  # the value of pixels without a class in mask files
Pixels = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Segment:
    """One thing, or one kind of stuff, in one image."""

    pixels: Pixels  # (height, width)
    category: int
    is_thing: bool


@dataclass(frozen=True, slots=True)
class Annotation:
    """What is where, on the token grid.

    Attributes:
        instances: Share of each token that each thing covers, `(I, N)`.
        cover: Share of each token that the class of its label covers, `(N,)`.
        labels: The class that covers at least half of a token, `(N,)`; -1 for none.
    """

    instances: Areas
    cover: Areas
    labels: NDArray[np.int64]


class MaskSource(Protocol):
    """Where masks come from."""

    def segments(self, image_path: Path, size: tuple[int, int]) -> list[Segment] | None:
        """Return what is in an image of that width and height; None if it was not annotated."""
        ...


def annotate(tower: Tower, segments: list[Segment], num_tokens: int) -> Annotation:
    """Bring the segments of an image onto its tokens."""
    shape = (0, num_tokens)
    areas = np.zeros(shape, np.float32)
    if segments:
        areas = tower.areas(np.stack([segment.pixels for segment in segments]))
    by_class: dict[int, Areas] = defaultdict(lambda: np.zeros(num_tokens, np.float32))
    for segment, area in zip(segments, areas, strict=True):
        by_class[segment.category] += area
    labels = np.full(num_tokens, -1, np.int64)
    cover = np.zeros(num_tokens, np.float32)
    for category, area in by_class.items():
        better = (area >= _LABELLED) & (area > cover)
        labels[better], cover[better] = category, area[better]
    things = [area for segment, area in zip(segments, areas, strict=True) if segment.is_thing]
    # Of a crop some instances are left out entirely.
    seen = [area for area in things if area.sum() > 0]
    instances = np.stack(seen) if seen else np.zeros(shape, np.float32)
    return Annotation(instances=instances, cover=cover, labels=labels)


def open_masks(path: Path) -> MaskSource:
    """Return the masks of a folder of PNG files, or of a COCO file: instances or panoptic."""
    if path.is_dir():
        return _MaskFolder(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        annotations = content["annotations"]
        names = {image["id"]: image["file_name"] for image in content["images"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CalibrationError(
            f"--masks must be a folder of PNG masks or a COCO annotation file, got {path}: {error}"
        ) from error
    if annotations and "segments_info" in annotations[0]:
        return _Panoptic(path.with_suffix(""), content, names)
    return _Instances(annotations, names)


class _MaskFolder:
    """PNG files named like the images: pixel 0 is background, 255 unlabelled, others are classes.

    A class counts as one thing: a mask does not tell two of a kind apart.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def segments(self, image_path: Path, size: tuple[int, int]) -> list[Segment] | None:
        path = self._folder / f"{image_path.stem}.png"
        if not path.exists():
            return None
        values = np.asarray(_resized(Image.open(path), size))
        if values.ndim > 2:
            values = values[..., 0]
        found = [int(value) for value in np.unique(values) if value not in (0, _UNLABELLED)]
        return [Segment(values == value, value, True) for value in found]


class _Panoptic:
    """COCO panoptic: a JSON file, and PNG files in the folder of the same name."""

    def __init__(self, folder: Path, content: Any, names: Mapping[int, str]) -> None:
        self._folder = folder
        self._things = {c["id"] for c in content["categories"] if c.get("isthing", 1)}
        self._by_stem = {Path(names[a["image_id"]]).stem: a for a in content["annotations"]}

    def segments(self, image_path: Path, size: tuple[int, int]) -> list[Segment] | None:
        annotation = self._by_stem.get(image_path.stem)
        if annotation is None:
            return None
        colors = np.asarray(
            _resized(Image.open(self._folder / annotation["file_name"]).convert("RGB"), size)
        ).astype(np.int64)
        ids = colors @ np.array([1, 256, 256 * 256])
        return [
            Segment(ids == part["id"], part["category_id"], part["category_id"] in self._things)
            for part in annotation["segments_info"]
            if not part.get("iscrowd")
        ]


class _Instances:
    """COCO instances: polygons or run lengths."""

    def __init__(self, annotations: list[Any], names: Mapping[int, str]) -> None:
        self._by_stem: dict[str, list[Any]] = {Path(name).stem: [] for name in names.values()}
        for annotation in annotations:
            if not annotation.get("iscrowd") and annotation["image_id"] in names:
                self._by_stem[Path(names[annotation["image_id"]]).stem].append(annotation)

    def segments(self, image_path: Path, size: tuple[int, int]) -> list[Segment] | None:
        annotations = self._by_stem.get(image_path.stem)
        if annotations is None:
            return None
        return [
            Segment(_pixels(annotation["segmentation"], size), annotation["category_id"], True)
            for annotation in annotations
        ]


def _pixels(segmentation: Any, size: tuple[int, int]) -> Pixels:
    """Draw a COCO segmentation."""
    if isinstance(segmentation, dict):
        counts = segmentation["counts"]
        if isinstance(counts, str):
            raise CalibrationError(
                "--masks holds compressed run lengths, which need pycocotools; save the "
                "annotations with polygons or uncompressed counts"
            )
        values = np.arange(len(counts)) % 2 == 1
        height, width = segmentation["size"]
        return np.repeat(values, counts).reshape(width, height).T
    canvas = Image.new("1", size)
    draw = ImageDraw.Draw(canvas)
    for polygon in segmentation:
        if len(polygon) >= 6:
            draw.polygon([float(value) for value in polygon], fill=1)
    return np.asarray(canvas)


def _resized(mask: Image.Image, size: tuple[int, int]) -> Image.Image:
    return mask if mask.size == size else mask.resize(size, Image.Resampling.NEAREST)

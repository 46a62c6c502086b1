"""Synthetic towers: what every layer moves is known, and images are rectangles on a ground."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from msdg_vllm.calibration.looking import Record, look
from msdg_vllm.calibration.masks import Annotation, Segment, annotate
from msdg_vllm.calibration.tower import Areas, Encoded, Masks, TowerInfo

SIDE, PATCH, WIDTH, LAYERS = 12, 8, 64, 12


@dataclass
class Planted:
    """Tokens that jump along a coordinate in one layer."""

    layer: int = 5
    ratio: float = 12.0  # of their update to the median one
    coordinates: tuple[int, ...] = (17,)
    share_of_images: float = 1.0
    count: int = 3


@dataclass
class SyntheticTower:
    """Layer `l` moves foreground tokens `1 + gain[l]` times as far as others, plus noise.

    Attributes:
        gain: Of the foreground by layer; below 0 the background moves farther.
        norms: Length of a usual update by layer.
        noise: Relative spread of lengths, which a mirror image does not share.
        sinks: What to plant.
    """

    gain: Sequence[float] = (0.0,) * LAYERS
    norms: Sequence[float] = (1.0,) * LAYERS
    noise: float = 0.1
    sinks: Planted | None = None
    encoded: int = 0
    info: TowerInfo = field(
        default_factory=lambda: TowerInfo(
            "synthetic", None, "0" * 64, "synthetic", LAYERS, LAYERS, WIDTH
        )
    )

    def encode(self, image: Image.Image) -> Encoded:
        self.encoded += 1
        pixels = np.asarray(image.convert("RGB"), np.float32) / 255
        content = int(hashlib.sha256(pixels.tobytes()).hexdigest()[:12], 16)
        own = np.random.default_rng(content)
        colors = pixels.reshape(SIDE, PATCH, SIDE, PATCH, 3).mean(axis=(1, 3)).reshape(-1, 3)
        foreground = colors[:, 0]  # red is what matters
        fixed = np.random.default_rng(7)
        states = [colors @ fixed.normal(size=(3, WIDTH)) + 0.1 * own.normal(size=(SIDE**2, WIDTH))]
        for layer in range(LAYERS):
            heading = colors @ fixed.normal(size=(3, WIDTH)) + 0.5 * fixed.normal(size=WIDTH)
            heading = heading + 0.2 * own.normal(size=heading.shape)
            heading /= np.linalg.norm(heading, axis=1, keepdims=True)
            length = 1 + self.gain[layer] * foreground + self.noise * own.normal(size=SIDE**2)
            update = self.norms[layer] * np.maximum(length, 0.05)[:, None] * heading
            if self.sinks is not None and self.sinks.layer == layer:
                update = self._with_sinks(update, own)
            states.append(states[-1] + update)
        return Encoded(
            [torch.from_numpy(state).float() for state in states],
            (SIDE, SIDE),
            np.ones(SIDE**2, bool),
        )

    def _with_sinks(self, update: np.ndarray, own: np.random.Generator) -> np.ndarray:
        assert self.sinks is not None
        if own.random() >= self.sinks.share_of_images:
            return update
        typical = np.median(np.linalg.norm(update, axis=1))
        for token in own.choice(SIDE**2, self.sinks.count, replace=False):
            update[token] = 0
            update[token, own.choice(self.sinks.coordinates)] = self.sinks.ratio * typical
        return update

    def areas(self, masks: Masks) -> Areas:
        shaped = masks.reshape(len(masks), SIDE, PATCH, SIDE, PATCH)
        return shaped.mean(axis=(2, 4), dtype=np.float32).reshape(len(masks), -1)

    def view(self, image: Image.Image) -> Image.Image:
        return image


def picture(seed: int) -> tuple[Image.Image, list[Segment]]:
    """Two red rectangles away from the border, on a ground of another color."""
    draw = np.random.default_rng(seed)
    size = SIDE * PATCH
    pixels = np.zeros((size, size, 3), np.uint8)
    pixels[..., 1:] = draw.integers(60, 200, 2)
    segments: list[Segment] = []
    for category in range(2):
        left, top = draw.integers(PATCH, size // 2, 2)
        width, height = draw.integers(2 * PATCH, 5 * PATCH, 2)
        mask = np.zeros((size, size), bool)
        mask[top : top + height, left : left + width] = True
        for segment in segments:
            segment.pixels[mask] = False
        pixels[mask] = (draw.integers(220, 255), *draw.integers(0, 120, 2))
        segments.append(Segment(mask, category + 1, True))
    return Image.fromarray(pixels), segments


def records(
    tower: SyntheticTower, number: int, *, masks: bool, width: int = 3, first: int = 0
) -> list[Record]:
    """The first look at some pictures."""
    made = []
    for seed in range(first, first + number):
        image, segments = picture(seed)
        annotation: Annotation | None = annotate(tower, segments, SIDE**2) if masks else None
        mirrored = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        flipped = None if masks else tower.encode(mirrored)
        made.append(look(tower.encode(image), width, 1, annotation, flipped))
    return made


def write_pictures(folder: Path, number: int) -> list[Path]:
    """Picture files, and their masks in a folder beside."""
    masks = folder.with_name(f"{folder.name}-masks")
    for place in (folder, masks):
        place.mkdir(parents=True)
    paths = []
    for seed in range(number):
        image, segments = picture(seed)
        values = np.zeros(image.size[::-1], np.uint8)
        for segment in segments:
            values[segment.pixels] = segment.category
        Image.fromarray(values).save(masks / f"{seed:03}.png")
        paths.append(folder / f"{seed:03}.png")
        image.save(paths[-1])
    return paths


def changed(tower: SyntheticTower, **info: Any) -> SyntheticTower:
    """The tower with another description."""
    return replace(tower, info=replace(tower.info, **info))

"""Seeded pictures with structure, in the sizes that break things."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw

SIZES = {
    "square": (336, 336),
    "wide": (900, 200),
    "tall": (150, 800),
    "tiny": (3, 2),
    "huge": (3000, 2000),
}


def make_picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A noisy gradient with coloured shapes on it."""
    generator = np.random.default_rng(seed)
    pixels = np.empty((height, width, 3), dtype=np.uint8)
    across = np.linspace(0, 120, width)[:, None]
    # Row by row: of a large picture, arrays of floats would take most of the time.
    for row, down in zip(pixels, np.linspace(0, 60, height), strict=True):
        row[:] = (across + down + generator.integers(0, 60, (width, 3))).clip(0, 255)
    picture = Image.fromarray(pixels)
    draw = ImageDraw.Draw(picture)
    for _ in range(6):
        x, y = int(generator.integers(0, width)), int(generator.integers(0, height))
        size = int(generator.integers(1, max(2, min(width, height) // 3)))
        colour = tuple(int(value) for value in generator.integers(0, 255, 3))
        if generator.random() < 0.5:
            draw.rectangle((x, y, x + size, y + size), fill=colour)
        else:
            draw.ellipse((x, y, x + size, y + size), fill=colour)
    return picture


def picture_of(kind: str, seed: int = 0) -> Image.Image:
    """A picture of one of the named sizes."""
    return make_picture(*SIZES[kind], seed=seed)

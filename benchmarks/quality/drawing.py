"""Drawing: a scene as a picture, on a textured and cluttered background."""

from dataclasses import replace
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from benchmarks.quality.scenes import CHARACTERS, Item, Scene

_RGB = {
    "red": (214, 32, 36),
    "green": (24, 150, 50),
    "blue": (32, 70, 220),
    "yellow": (245, 222, 40),
    "purple": (150, 40, 190),
    "orange": (248, 130, 16),
    "white": (250, 250, 250),
    "black": (12, 12, 12),
}
_PAPER = (250, 250, 246)
_INK = (16, 16, 20)
_LETTER = 19  # of a character 16 pixels wide
_MODEL_AREA = 96 * 96


def draw_scene(scene: Scene) -> Image.Image:
    """Return the picture of `scene`; the same scene always gives the same pixels."""
    rng = np.random.default_rng([scene.seed, 1])
    if scene.sides is not None:
        return _draw_fine(rng, scene, scene.sides)
    picture = Image.fromarray(_texture(rng, scene.width, scene.height))
    canvas = ImageDraw.Draw(picture)
    _add_clutter(rng, canvas, scene.width, scene.height)
    for item in scene.items:
        _draw_item(rng, canvas, scene, item)
    return picture


def _draw_fine(rng: np.random.Generator, scene: Scene, sides: tuple[int, int]) -> Image.Image:
    """Draw twice as large, with stray letters and faint items, then scale to the size wanted."""
    large = replace(scene, width=2 * sides[0], height=2 * sides[1])
    picture = Image.fromarray(_texture(rng, large.width, large.height))
    canvas = ImageDraw.Draw(picture)
    for _ in range(round(sides[0] * sides[1] / _MODEL_AREA)):
        _add_clutter(rng, canvas, large.width, large.height)
        _add_letter(rng, canvas, large)
    for item in scene.items:
        behind = picture.copy()
        _draw_item(rng, canvas, large, item)
        if item.opacity < 1:
            picture.paste(Image.blend(behind, picture, item.opacity))
    return picture.resize((scene.width, scene.height), Image.Resampling.BICUBIC)


def _texture(rng: np.random.Generator, width: int, height: int) -> np.ndarray:
    """Muted colour that drifts over the picture, with stripes and grain; (height, width, 3)."""
    tint = rng.uniform(85, 170) + rng.uniform(-18, 18, size=3)
    coarse = rng.normal(0, 12, size=(6, 6, 3)).astype(np.float32)
    drift = np.stack(
        [
            np.asarray(
                Image.fromarray(coarse[:, :, band]).resize(
                    (width, height), Image.Resampling.BICUBIC
                )
            )
            for band in range(3)
        ],
        axis=-1,
    )
    angle, period = rng.uniform(0, np.pi), rng.uniform(8, 40)
    across = np.cos(angle) * np.arange(width)[None] + np.sin(angle) * np.arange(height)[:, None]
    stripes = rng.uniform(0, 14) * np.sin(across * (2 * np.pi / period))
    grain = rng.normal(0, rng.uniform(2, 9), size=(height, width)).astype(np.float32)
    blend: np.ndarray = np.clip(tint + drift + (stripes + grain)[:, :, None], 0, 255)
    return blend.astype(np.uint8)


def _add_clutter(
    rng: np.random.Generator, canvas: ImageDraw.ImageDraw, width: int, height: int
) -> None:
    """Scratches, specks and faint blobs that are nothing one could ask about."""
    for _ in range(int(rng.integers(8, 24))):
        gray = rng.uniform(70, 185) + rng.uniform(-20, 20, size=3)
        color = tuple(int(band) for band in gray)
        x, y = rng.uniform(0, width), rng.uniform(0, height)
        dx, dy = rng.uniform(-30, 30, size=2)
        form = int(rng.integers(3))
        if form == 0:
            canvas.line((x, y, x + dx, y + dy), fill=color, width=int(rng.integers(1, 3)))
        elif form == 1:
            radius = rng.uniform(0.5, 2.5)
            canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
        else:
            box = (x - abs(dx), y - abs(dy), x + abs(dx), y + abs(dy))
            canvas.arc(box, rng.uniform(0, 180), rng.uniform(180, 360), fill=color)


def _add_letter(rng: np.random.Generator, canvas: ImageDraw.ImageDraw, scene: Scene) -> None:
    """A character that is on no sign, or an empty frame without colour."""
    gray = int(rng.uniform(40, 215))
    x, y = rng.uniform(0, scene.width), rng.uniform(0, scene.height)
    if rng.random() < 0.5:
        letter = CHARACTERS[int(rng.integers(len(CHARACTERS)))]
        canvas.text((x, y), letter, fill=(gray,) * 3, font=_font(_LETTER), anchor="mm")
    else:
        wide = rng.uniform(10, 34)
        canvas.rectangle((x - wide, y - 11, x + wide, y + 11), outline=(gray,) * 3, width=2)


def _draw_item(
    rng: np.random.Generator, canvas: ImageDraw.ImageDraw, scene: Scene, item: Item
) -> None:
    jitter = rng.integers(-10, 11, size=3)
    color = tuple(
        int(np.clip(c + j, 0, 255)) for c, j in zip(_RGB[item.color], jitter, strict=True)
    )
    cx, cy = item.x * scene.width, item.y * scene.height
    rx, ry = item.width * scene.width / 2, item.height * scene.height / 2
    box = (cx - rx, cy - ry, cx + rx, cy + ry)
    if item.is_sign:
        canvas.rectangle(box, fill=color)
        edge = 3
        canvas.rectangle((box[0] + edge, box[1] + edge, box[2] - edge, box[3] - edge), fill=_PAPER)
        _write(canvas, scene, item, cx, cy)
    elif item.name == "circle":
        canvas.ellipse(box, fill=color)
    elif item.name == "ring":
        canvas.ellipse(box, outline=color, width=round(0.56 * min(rx, ry)))
    elif item.name == "square":
        canvas.rectangle((cx - 0.9 * rx, cy - 0.9 * ry, cx + 0.9 * rx, cy + 0.9 * ry), fill=color)
    else:
        outline = [(cx + rx * px, cy + ry * py) for px, py in _OUTLINES[item.name]]
        canvas.polygon(outline, fill=color)


def _write(canvas: ImageDraw.ImageDraw, scene: Scene, item: Item, cx: float, cy: float) -> None:
    """One character per cell, so that width depends on the length of the code alone."""
    font = _font(_LETTER if scene.sides else round(0.1 * scene.height))
    step = scene.character_width * scene.width
    for position, character in enumerate(item.code):
        x = cx + (position - (len(item.code) - 1) / 2) * step
        canvas.text((x, cy), character, fill=_INK, font=font, anchor="mm")


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=size)


def _star() -> list[tuple[float, float]]:
    radii = (1.08, 0.42)
    angles = [(-0.5 + position / 5) * np.pi for position in range(10)]
    return [
        (radii[position % 2] * float(np.cos(angle)), radii[position % 2] * float(np.sin(angle)))
        for position, angle in enumerate(angles)
    ]


_ARM = 0.34
_OUTLINES: dict[str, list[tuple[float, float]]] = {
    "triangle": [(0.0, -1.0), (1.0, 0.95), (-1.0, 0.95)],
    "star": _star(),
    "cross": [
        (-_ARM, -1), (_ARM, -1), (_ARM, -_ARM), (1, -_ARM), (1, _ARM), (_ARM, _ARM),
        (_ARM, 1), (-_ARM, 1), (-_ARM, _ARM), (-1, _ARM), (-1, -_ARM), (-_ARM, -_ARM),
    ],
}  # fmt: skip

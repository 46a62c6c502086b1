"""Pictures that weigh what photographs weigh, a different one for every number."""

import base64
import random
from functools import lru_cache
from io import BytesIO

from PIL import Image, ImageDraw, ImageFilter

# A thumbnail, a phone in both directions, a screen.
SIZES = ((336, 336), (640, 480), (480, 640), (1280, 720))


@lru_cache(maxsize=len(SIZES))
def _background(size: tuple[int, int]) -> Image.Image:
    """Soft colour with grain, which JPEG compresses about as well as a photograph."""
    pixels = random.Random(0)
    noise = Image.frombytes("L", size, pixels.randbytes(size[0] * size[1])).convert("RGB")
    colours = Image.new("RGB", (8, 8))
    colours.putdata([(pixels.randrange(256), pixels.randrange(256), 128) for _ in range(64)])
    return Image.blend(colours.resize(size, Image.Resampling.BICUBIC), noise, 0.1).filter(
        ImageFilter.SMOOTH
    )


def picture(number: int, size: tuple[int, int] = SIZES[0]) -> Image.Image:
    """Return picture `number`: a background, the same for all, with a few shapes of its own."""
    chance = random.Random(number)
    image = _background(size).copy()
    pen = ImageDraw.Draw(image)
    width, height = size
    for _ in range(12):
        x, y = chance.randrange(width), chance.randrange(height)
        box = (x, y, x + chance.randrange(8, width // 3), y + chance.randrange(8, height // 3))
        colour = tuple(chance.randrange(256) for _ in range(3))
        chance.choice((pen.ellipse, pen.rectangle))(box, fill=colour)
    return image


def picture_url(number: int, size: tuple[int, int] = SIZES[0]) -> str:
    """Return picture `number` as a JPEG data URL."""
    return data_url(picture(number, size), "jpeg", quality=88)


def data_url(image: Image.Image, kind: str = "png", **options: int) -> str:
    """Return a picture in the form in which it travels in a request."""
    with BytesIO() as file:
        image.save(file, kind, **options)
        return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"

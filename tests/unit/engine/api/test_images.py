"""Odd images look to the encoder as they look to a viewer."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from vllm.multimodal.media import ImageMediaIO

from msdg_vllm.engine.api import images


@pytest.fixture(autouse=True)
def installed() -> None:
    images.install()


def loaded(image: Image.Image, kind: str = "PNG", **options: object) -> Image.Image:
    with BytesIO() as file:
        image.save(file, kind, **options)
        media: Image.Image = ImageMediaIO().load_bytes(file.getvalue()).media
    return media


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bit_grey_keeps_its_levels(kind: str) -> None:
    ramp = np.linspace(0, 65535, 256, dtype=np.uint16).reshape(16, 16)
    picture = loaded(Image.fromarray(ramp), kind)
    assert picture.mode == "RGB"
    assert np.asarray(picture)[..., 0].flatten().tolist() == list(range(256))


def test_a_transparent_colour_shows_the_background() -> None:
    picture = Image.new("RGB", (2, 1), (10, 20, 30))
    picture.putpixel((1, 0), (200, 100, 50))
    seen = loaded(picture, transparency=(10, 20, 30))
    assert [seen.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (200, 100, 50)]


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "1"])
def test_other_images_stay_as_vllm_loads_them(mode: str) -> None:
    image = Image.linear_gradient("L").convert(mode)
    stock = ImageMediaIO._convert_image_mode.__wrapped__  # type: ignore[attr-defined]
    expected = stock(ImageMediaIO(), image)
    assert loaded(image).tobytes() == expected.tobytes()

"""Images as a viewer shows them.

Fills two gaps: Pillow cuts 16-bit grey off at 255, so that nearly all of it turns white, and vLLM
takes an RGB image as it is, also when its file names a transparent colour.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image
from vllm.multimodal.media import ImageMediaIO

from msdg_vllm.engine.hooks import wrap

_SIXTEEN_BIT = frozenset({"I;16", "I;16L", "I;16B", "I;16N"})


def as_viewed(image: Image.Image) -> Image.Image:
    """Bring an image into a mode whose conversion to RGB shows what a viewer shows."""
    if image.mode in _SIXTEEN_BIT:
        # 257 = 65535 / 255; the nearest of the 256 levels.
        levels = (np.asarray(image).astype(np.uint32) + 128) // 257
        return Image.fromarray(levels.astype(np.uint8))
    if image.mode == "RGB" and "transparency" in image.info:
        return image.convert("RGBA")
    return image


def install() -> None:
    """Let vLLM convert images as they are viewed; again changes nothing."""
    wrap(ImageMediaIO, "_convert_image_mode", _convert_as_viewed)


def _convert_as_viewed(stock: Any, self: ImageMediaIO, image: Any) -> Any:
    if isinstance(image, Image.Image) and self.image_mode == "RGB":
        image = as_viewed(image)
    return stock(self, image)

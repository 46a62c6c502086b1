"""From an image to the pixels of both towers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional
from transformers import BatchFeature
from transformers.image_transforms import to_pil_image

from msdg_vllm.models.mini_gemini.config import MGMConfig

# Mean and spread of the colours that CLIP was trained on.
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
_PADDING = tuple(int(255 * mean) for mean in MEAN)


class MiniGeminiImages:
    """Turns images into `pixel_values_aux`, high resolution, and `pixel_values`, tiles of it.

    The tiles are made from the normalised high-resolution pixels, not from the image: the
    published models were trained that way.
    """

    def __init__(self, config: MGMConfig) -> None:
        self.tile_size = int(config.vision_config.image_size)
        self.high_size = config.image_size_aux
        self.grid = config.image_grid

    def __call__(self, images: Sequence[Any], **_: object) -> BatchFeature:
        high = [self.high_resolution(image) for image in images]
        return BatchFeature(
            {
                "pixel_values": torch.stack([self.tiles(pixels) for pixels in high]),
                "pixel_values_aux": torch.stack(high),
            }
        )

    def high_resolution(self, image: Any) -> torch.Tensor:
        """Pad to a square, resize, normalise: `(3, S, S)` float32."""
        given = image if isinstance(image, Image.Image) else to_pil_image(image)
        square = _padded(given.convert("RGB"))
        resized = square.resize((self.high_size, self.high_size), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.array(resized)).float() / 255
        return ((pixels - torch.tensor(MEAN)) / torch.tensor(STD)).permute(2, 0, 1).contiguous()

    def tiles(self, high: torch.Tensor) -> torch.Tensor:
        """The whole image, then the cells of the grid row by row: `(T, 3, tile, tile)`."""
        low = _shrunk(high, self.grid * self.tile_size)
        if self.grid == 1:
            return low.unsqueeze(0)
        cells = low.view(3, self.grid, self.tile_size, self.grid, self.tile_size)
        cells = cells.permute(1, 3, 0, 2, 4).flatten(0, 1)
        return torch.cat([_shrunk(low, self.tile_size).unsqueeze(0), cells])


def _padded(image: Image.Image) -> Image.Image:
    width, height = image.size
    side = max(width, height)
    if width == height:
        return image
    square = Image.new("RGB", (side, side), _PADDING)
    square.paste(image, ((side - width) // 2, (side - height) // 2))
    return square


def _shrunk(pixels: torch.Tensor, side: int) -> torch.Tensor:
    resized = functional.interpolate(pixels.unsqueeze(0), size=(side, side), mode="bilinear")
    return resized.squeeze(0)

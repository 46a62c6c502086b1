"""Canvases: how each model sees a picture, as the pool stores it."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from PIL import Image
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize


class Canvas(Protocol):
    """Turns a picture into the array a tower reads, and says how many tokens that has."""

    @property
    def name(self) -> str:
        """Part of a pool's file name."""

    @property
    def pixels_shape(self) -> tuple[int, ...]: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def has_forms(self) -> bool:
        """Whether pictures differ in form."""

    def form(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of tokens of a picture of that size."""

    def arrange(self, picture: Image.Image) -> np.ndarray:
        """Return the picture as uint8, at most `pixels_shape`."""


@dataclass(frozen=True, slots=True)
class Square:
    """Pictures squashed to `side` x `side` pixels, `grid` x `grid` tokens."""

    side: int
    grid: int

    @property
    def name(self) -> str:
        return f"{self.side}-{self.grid}"

    @property
    def pixels_shape(self) -> tuple[int, ...]:
        return self.side, self.side, 3

    @property
    def max_tokens(self) -> int:
        return self.grid**2

    @property
    def has_forms(self) -> bool:
        return False

    def form(self, width: int, height: int) -> tuple[int, int]:
        return self.grid, self.grid

    def arrange(self, picture: Image.Image) -> np.ndarray:
        return np.asarray(picture.resize((self.side, self.side), Image.Resampling.BICUBIC))


@dataclass(frozen=True, slots=True)
class AnyForm:
    """Pictures of their own form; a token is 2 x 2 patches of `patch` x `patch` pixels.

    Stored token by token in raster order, each as its four patches (two above two), a patch as
    channels, rows, columns: the order in which Qwen's processor lays pixels out.
    """

    patch: int
    min_pixels: int
    max_pixels: int

    @property
    def name(self) -> str:
        return f"any-{self.patch}-{self.max_pixels}"

    @property
    def pixels_shape(self) -> tuple[int, ...]:
        return self.max_tokens, 12 * self.patch**2

    @property
    def max_tokens(self) -> int:
        return self.max_pixels // (2 * self.patch) ** 2

    @property
    def has_forms(self) -> bool:
        return True

    def form(self, width: int, height: int) -> tuple[int, int]:
        side = 2 * self.patch
        high, wide = smart_resize(height, width, side, self.min_pixels, self.max_pixels)
        return high // side, wide // side

    def arrange(self, picture: Image.Image) -> np.ndarray:
        rows, columns = self.form(*picture.size)
        side = 2 * self.patch
        picture = picture.resize((columns * side, rows * side), Image.Resampling.BICUBIC)
        cut = np.asarray(picture).reshape(rows, 2, self.patch, columns, 2, self.patch, 3)
        return cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, -1)

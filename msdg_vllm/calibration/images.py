"""The images of a folder: which are looked at, and what speaks against them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from msdg_vllm.core.errors import CalibrationError

MIN_IMAGES = 20
ENOUGH_IMAGES = 64
_SUFFIXES = {".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
_SAME_BITS = 6  # of 64: images that differ in no more are near-duplicates
_HASH_SIDE = 8


def find_images(folder: Path, number: int) -> list[Path]:
    """Return up to `number` image files below a folder, evenly spread over the sorted names."""
    if not folder.is_dir():
        raise CalibrationError(f"--images must be a folder, got {folder}")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES)
    if not paths:
        raise CalibrationError(
            f"no image in {folder}: put at least {MIN_IMAGES} photos there "
            f"({', '.join(sorted(_SUFFIXES))})"
        )
    if number >= len(paths):
        return paths
    return [paths[place] for place in np.linspace(0, len(paths) - 1, number).round().astype(int)]


def read_image(path: Path) -> Image.Image | None:
    """Return an image as RGB; None if it cannot be read."""
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None


def fingerprint_of(image: Image.Image) -> NDArray[np.bool_]:
    """Return a fingerprint of an image's brightness gradients (dHash)."""
    small = image.convert("L").resize((_HASH_SIDE + 1, _HASH_SIDE), Image.Resampling.BOX)
    values = np.asarray(small, np.int16)
    brighter: NDArray[np.bool_] = values[:, 1:] > values[:, :-1]
    return brighter.reshape(-1)


def num_near_duplicates(fingerprints: Sequence[NDArray[Any]]) -> int:
    """Return how many images look like one before them."""
    bits = np.stack(fingerprints).astype(np.float32)
    distance = bits @ (1 - bits).T
    distance += distance.T
    earlier = np.tril(distance <= _SAME_BITS, k=-1)
    return int(earlier.any(axis=1).sum())

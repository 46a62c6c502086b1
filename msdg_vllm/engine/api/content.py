"""What identifies the content of an image or video: its pixels, however they came."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from PIL import Image


def content_key(mm_hash: str, salt: str) -> int:
    """Return a number of 126 bits, not 0, for an item's hash by content; salts have others."""
    separate = hashlib.blake2b(salt.encode(), digest_size=32).digest() if salt else b""
    digest = hashlib.blake2b(mm_hash.encode(), digest_size=16, key=separate)
    return (int.from_bytes(digest.digest()) >> 2) or 1


def content_number(media: Any) -> int:
    """Return a number of 63 bits that equal pixels share.

    vLLM's own hashes know a file from its pixels, and are replaced by numbers of requests where
    nothing is cached.
    """
    frames = media[0] if isinstance(media, tuple) else media  # videos come with metadata
    if isinstance(frames, Image.Image):
        frames = frames.convert("RGB")
    pixels = np.ascontiguousarray(frames)
    digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=8)
    digest.update(pixels.data)
    return int.from_bytes(digest.digest()) >> 1

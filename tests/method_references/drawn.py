"""Tokens drawn by what an image is, with Python's integers."""

import hashlib

from PIL import Image

MASK = 2**31 - 1


def random_reference(image: Image.Image, num_tokens: int, budget: int) -> list[int]:
    """The tokens with the largest hashes of the image's pixels and their place."""
    picture = image.convert("RGB")
    shape = (picture.height, picture.width, 3)
    digest = hashlib.blake2b(repr(shape).encode() + picture.tobytes(), digest_size=8).digest()
    seed = int.from_bytes(digest, "big") // 2

    def score(place: int) -> int:
        value, rest = place, seed
        while True:
            value = (value + 1) * 0x9E3779B1 + (rest & MASK)
            for multiplier in (0x45D9F3B, 0x2C1B3C6D, 0x297A2D39):
                value &= MASK
                value = (value ^ (value >> 15)) * multiplier
            value &= MASK
            rest >>= 31
            if not rest:
                return value >> 7

    return sorted(sorted(range(num_tokens), key=lambda place: (-score(place), place))[:budget])

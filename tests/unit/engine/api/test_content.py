"""Equal pixels have equal numbers, however they came."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from PIL import Image

from msdg_vllm.engine.api.pixels import content_key, content_number
from tests.pictures import make_picture


def test_a_file_and_its_pixels_have_the_same_number() -> None:
    picture = make_picture(60, 40, seed=1)
    with BytesIO() as file:
        picture.save(file, "PNG")
        again = Image.open(BytesIO(file.getvalue()))
        number = content_number(picture)
        assert content_number(again) == number
    assert content_number(np.asarray(picture)) == number
    assert content_number(picture.convert("RGBA")) == number
    assert 0 <= number < 2**63


def test_other_pixels_and_other_shapes_have_other_numbers() -> None:
    pictures = [make_picture(60, 40, seed) for seed in range(3)]
    flat = Image.frombytes("RGB", (40, 60), pictures[0].tobytes())
    assert len({content_number(picture) for picture in (*pictures, flat)}) == 4


def test_a_video_counts_by_its_frames_not_by_its_metadata() -> None:
    frames = np.stack([np.asarray(make_picture(20, 20, seed)) for seed in range(3)])
    assert content_number((frames, {"fps": 1})) == content_number((frames, {"fps": 2}))
    assert content_number(frames[::-1]) != content_number(frames)


def test_a_key_belongs_to_one_content_and_one_salt() -> None:
    keys = [content_key(text, salt) for text in ("a", "b") for salt in ("", "x", "y")]
    assert len(set(keys)) == 6
    assert all(0 < key < 2**126 for key in keys)
    assert content_key("a", "x") == keys[1]

"""Fine scenes: pictures of several sizes in which items keep their own, small and many.

A token shows 8 x 8 pixels whatever the size of the picture, so the larger a picture, the smaller a
part of it is an item, and the more is lost when the picture is scaled down.
"""

from dataclasses import replace
from typing import Literal

import numpy as np

from benchmarks.quality.scenes import (
    CHARACTERS,
    COLORS,
    MAX_CODE,
    TRAINING_PAIRS,
    Item,
    Scene,
    Split,
)

FINE: Literal["fine"] = "fine"
AnySplit = Split | Literal["fine"]

TOKEN_SIDE = 8  # pixels
# Rows and columns of tokens.
GRIDS = ((12, 12), (12, 18), (18, 12), (16, 16), (16, 24), (24, 16), (24, 24))
MAX_FINE_ITEMS = 9
# Behind all seeds of the other splits.
_FIRST_SEED = 1 << 50
_SCALES = (2, 3, 4)
_SCALED = 0.3
_GAP = 3
_SIGN_HEIGHT = 12
_SIGN_MARGIN = 4
_SIGN_JITTER = 0.75
_MOST_BY_AREA = {144: 5, 216: 6, 256: 7, 384: 8, 576: 9}


def sample_fine(index: int, training: bool = False) -> Scene:
    """Return fine scene number `index`; those of the training and the others never share a seed.

    Three in ten of the training's are whole scenes scaled down to a half, a third or a quarter.
    """
    seed = _FIRST_SEED * (1 + training) + index
    rng = np.random.default_rng(seed)
    rows, columns = GRIDS[int(rng.integers(len(GRIDS)))]
    most = _MOST_BY_AREA[rows * columns]
    num_items = int(rng.integers(most // 2 + 1, most + 1))
    num_signs = min(int(rng.choice(4, p=(0.1, 0.5, 0.3, 0.1))), num_items - 2)
    sides = columns * TOKEN_SIDE, rows * TOKEN_SIDE
    items: list[Item] = []
    for color, name, code in _sample_kinds(rng, num_items - num_signs, num_signs):
        placed = _place(rng, color, name, code, sides, items)
        if placed is not None:
            items.append(placed)
    scene = Scene(seed, *sides, tuple(items), sides)
    if training and rng.random() < _SCALED:
        factor = _SCALES[int(rng.integers(len(_SCALES)))]
        high, wide = (max(3, round(number / factor)) * TOKEN_SIDE for number in (rows, columns))
        scene = replace(scene, width=wide, height=high)
    return scene


def _sample_kinds(
    rng: np.random.Generator, num_shapes: int, num_signs: int
) -> list[tuple[str, str, str]]:
    """Colour, name and code of each item, signs first; half of the shapes are like another."""
    chosen: list[tuple[str, str]] = []
    for _ in range(num_shapes):
        alike = list(TRAINING_PAIRS)
        if chosen and rng.random() < 0.5:
            near, axis = chosen[int(rng.integers(len(chosen)))], int(rng.integers(2))
            alike = [pair for pair in alike if pair[axis] == near[axis]]
        chosen.append(alike[int(rng.integers(len(alike)))])
    signs = []
    for frame in rng.permutation(len(COLORS))[:num_signs]:
        letters = rng.integers(len(CHARACTERS), size=int(rng.integers(1, MAX_CODE + 1)))
        signs.append((COLORS[int(frame)], "sign", "".join(CHARACTERS[int(i)] for i in letters)))
    return [*signs, *((color, shape, "") for color, shape in chosen)]


def _place(
    rng: np.random.Generator,
    color: str,
    name: str,
    code: str,
    sides: tuple[int, int],
    others: list[Item],
) -> Item | None:
    """Put an item where none is, a third of them faint; None if no place is found."""
    across, down = sides
    width: float
    height: float
    if name == "sign":
        width, height = len(code) * TOKEN_SIDE + _SIGN_MARGIN, _SIGN_HEIGHT
        opacity = float(rng.uniform(0.6, 1)) if rng.random() < 0.33 else 1.0
    else:
        width = height = float(rng.uniform(9, 14))
        opacity = float(rng.uniform(0.5, 1)) if rng.random() < 0.33 else 1.0
    for _ in range(50):
        if name == "sign":
            x, y = _hang(rng, across, len(code)), _hang(rng, down, 1)
        else:
            x = float(rng.uniform(width / 2 + 1, across - 1 - width / 2))
            y = float(rng.uniform(height / 2 + 1, down - 1 - height / 2))
        free = all(
            abs(x - other.x * across) > (width + other.width * across) / 2 + _GAP
            or abs(y - other.y * down) > (height + other.height * down) / 2 + _GAP
            for other in others
        )
        if free:
            placed = x / across, y / down, width / across, height / down
            return Item(color, name, code, *placed, opacity)
    return None


def _hang(rng: np.random.Generator, side: int, num_characters: int) -> float:
    """Return a centre that puts each of a sign's characters into one token, nearly."""
    first = int(rng.integers(1, side // TOKEN_SIDE - num_characters))
    middle = (first + num_characters / 2) * TOKEN_SIDE
    return middle + float(rng.uniform(-_SIGN_JITTER, _SIGN_JITTER))

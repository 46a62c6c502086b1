"""Scenes: what is in a generated picture and where, known exactly.

A scene is sampled from a seed alone, so a picture never needs to be stored to be asked about.
Coordinates are fractions of the picture, so that they survive any resizing.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

COLORS = ("red", "green", "blue", "yellow", "purple", "orange", "white", "black")
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
# Characters that stay apart at 6 x 7 pixels; 0, 1 and their look-alikes do not, and M is too wide.
CHARACTERS = "ACEFHKLPTUXY2345679"

# These pairs appear in no training scene and no training question.
HELD_OUT_PAIRS = frozenset(
    {
        ("red", "star"),
        ("green", "cross"),
        ("blue", "ring"),
        ("yellow", "circle"),
        ("purple", "square"),
        ("orange", "triangle"),
    }
)
TRAINING_PAIRS = tuple(
    (color, shape) for color in COLORS for shape in SHAPES if (color, shape) not in HELD_OUT_PAIRS
)

MAX_ITEMS = 5
MAX_CODE = 3
Split = Literal["train", "test", "held_out", "crowded", "small"]

# Sizes are in pixels of the 96-pixel square that the model sees, over its side.
_MODEL_SIDE = 96
_GAP = 3 / _MODEL_SIDE
_SIGN_HEIGHT = 12 / _MODEL_SIDE
_SIGN_MARGIN = 4 / _MODEL_SIDE
CHARACTER_WIDTH = 8 / _MODEL_SIDE
# Signs hang so that a character falls into one patch of 8 pixels, give or take this: a tower this
# small does not learn to read characters that are cut anywhere.
_SIGN_JITTER = 0.75 / _MODEL_SIDE
# Training seeds stay below; test seeds start here, so the two can never meet.
_FIRST_TEST_SEED = 1 << 40
# Splits in the order of their seeds, each of which starts where the one before could not reach.
_SPLITS: tuple[Split, ...] = ("train", "test", "held_out", "crowded", "small")
_CROWD = 8
_SMALL = 0.7


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to ask about: a coloured shape, or a sign in a coloured frame with a code on it."""

    color: str
    name: str  # a shape, or "sign"
    code: str  # empty unless a sign
    x: float  # centre
    y: float
    width: float
    height: float
    opacity: float = 1.0  # how little of the background it lets through

    @property
    def is_sign(self) -> bool:
        return self.name == "sign"


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture's contents; `seed` also drives the background when it is drawn."""

    seed: int
    width: int  # of the drawn picture, in pixels
    height: int
    items: tuple[Item, ...]
    sides: tuple[int, int] | None = None  # before it is scaled to that size; None: sizes vary

    @property
    def character_width(self) -> float:
        """Of the picture's width."""
        return 8 / self.sides[0] if self.sides else CHARACTER_WIDTH

    @property
    def shapes(self) -> tuple[Item, ...]:
        return tuple(item for item in self.items if not item.is_sign)

    @property
    def signs(self) -> tuple[Item, ...]:
        return tuple(item for item in self.items if item.is_sign)


def sample_scene(index: int, split: Split = "train") -> Scene:
    """Return scene number `index` of a split; the same arguments always give the same scene.

    `train` and `test` hold training pairs only and never share a seed; every `held_out` scene holds
    at least one colour and shape that were never seen together in training. The others are harder
    than any scene of the training: `crowded` ones have more items, `small` ones smaller shapes.
    """
    if index < 0:
        raise ValueError(f"index must be >= 0, got {index}; scenes are numbered from 0")
    seed = index + _SPLITS.index(split) * _FIRST_TEST_SEED
    rng = np.random.default_rng(seed)
    width, height = _sample_size(rng)
    num_signs = int(rng.choice(3, p=(0.2, 0.6, 0.2)))
    num_shapes = int(rng.integers(2, MAX_ITEMS - num_signs + 1))
    if split == "crowded":
        num_shapes = _CROWD - num_signs
    wanted = _sample_kinds(rng, num_shapes, num_signs, split)
    items: list[Item] = []
    for color, name, code in wanted:
        placed = _place(rng, color, name, code, items)
        if placed is not None:
            items.append(placed)
    if split == "small":
        items = [
            item
            if item.is_sign
            else replace(item, width=_SMALL * item.width, height=_SMALL * item.height)
            for item in items
        ]
    return Scene(seed, width, height, tuple(items))


def _sample_size(rng: np.random.Generator) -> tuple[int, int]:
    """Mostly square; the rest up to 4:3 either way, which the processor squashes to a square."""
    long_side = int(rng.integers(192, 257))
    form = rng.random()
    if form < 0.7:
        return 192, 192
    return (long_side, 192) if form < 0.85 else (192, long_side)


def _sample_kinds(
    rng: np.random.Generator, num_shapes: int, num_signs: int, split: Split
) -> list[tuple[str, str, str]]:
    pairs = list(TRAINING_PAIRS)
    chosen = [pairs[int(rng.integers(len(pairs)))] for _ in range(num_shapes)]
    # Equal shapes and equal colours are rare by chance, and counting needs them.
    for position in range(1, num_shapes):
        if rng.random() < 0.4:
            color, shape = chosen[int(rng.integers(position))]
            axis = int(rng.integers(2))
            alike = [pair for pair in pairs if pair[axis] == (color, shape)[axis]]
            chosen[position] = alike[int(rng.integers(len(alike)))]
    if split == "held_out":
        unseen = sorted(HELD_OUT_PAIRS)
        chosen[0] = unseen[int(rng.integers(len(unseen)))]
        if num_shapes > 3:
            chosen[1] = unseen[int(rng.integers(len(unseen)))]
    frames = rng.permutation(len(COLORS))[:num_signs]
    kinds = [(color, shape, "") for color, shape in chosen]
    for frame in frames:
        length = int(rng.integers(1, MAX_CODE + 1))
        code = "".join(CHARACTERS[int(i)] for i in rng.integers(len(CHARACTERS), size=length))
        kinds.append((COLORS[int(frame)], "sign", code))
    # Signs are the widest, so they are placed first: rejection then seldom fails.
    return kinds[::-1]


def _place(
    rng: np.random.Generator, color: str, name: str, code: str, others: list[Item]
) -> Item | None:
    if name == "sign":
        width, height = len(code) * CHARACTER_WIDTH + _SIGN_MARGIN, _SIGN_HEIGHT
    else:
        width = height = float(rng.uniform(11, 14)) / _MODEL_SIDE
    for _ in range(50):
        x = float(rng.uniform(width / 2 + 0.01, 0.99 - width / 2))
        y = float(rng.uniform(height / 2 + 0.01, 0.99 - height / 2))
        if name == "sign":
            x, y = _hang(rng, x, len(code)), _hang(rng, y, 1)
        free = all(
            abs(x - other.x) > (width + other.width) / 2 + _GAP
            or abs(y - other.y) > (height + other.height) / 2 + _GAP
            for other in others
        )
        if free:
            return Item(color, name, code, x, y, width, height)
    return None


def _hang(rng: np.random.Generator, center: float, num_characters: int) -> float:
    """Return the centre near `center` that puts each of a sign's characters into one patch."""
    shift = num_characters / 2
    last = round(1 / CHARACTER_WIDTH) - num_characters - 1
    first = min(max(round(center / CHARACTER_WIDTH - shift), 1), last)
    return (first + shift) * CHARACTER_WIDTH + float(rng.uniform(-_SIGN_JITTER, _SIGN_JITTER))

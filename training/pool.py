"""Pool: training scenes drawn, asked about and tokenised once, before training starts.

Drawing costs more than a training step has to spare, so all of it happens up front, in worker
processes, and is kept in a file that any stage can sample from.
"""

import hashlib
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from benchmarks.quality.drawing import draw_scene
from benchmarks.quality.fine import FINE, MAX_FINE_ITEMS, AnySplit, sample_fine
from benchmarks.quality.questions import FINE_KINDS, KINDS, ask
from benchmarks.quality.scenes import (
    CHARACTERS,
    COLORS,
    MAX_CODE,
    MAX_ITEMS,
    SHAPES,
    Scene,
    sample_scene,
)
from training.canvas import Canvas
from training.qwen import CANVAS
from training.tokenizer import build_tokenizer

NAMES = (*SHAPES, "sign")
BACKGROUND, UNCLEAR = -1, -2
_QUESTIONS_PER_KIND = 2
_MAX_QUESTION_TOKENS = 52
_CHUNK = 250
_USUAL_EVERY = 4


@dataclass(frozen=True)
class Pool:
    """Arrays over scenes (S), items (I), questions (Q) and question tokens (T)."""

    pixels: np.ndarray  # (S, ...) uint8, as the canvas arranges them
    owner: np.ndarray  # (S, N) item of each token's patch, or BACKGROUND, or UNCLEAR
    colors: np.ndarray  # (S, I) index into COLORS, -1 past the last item
    names: np.ndarray  # (S, I) index into NAMES
    characters: np.ndarray  # (S, I, 3) index into CHARACTERS, -1 past the end of the code
    centers: np.ndarray  # (S, I, 2)
    kinds: np.ndarray  # (S, Q) index into KINDS, -1 where there is no question
    tokens: np.ndarray  # (S, Q, T) from the line break after the image to the end of the answer
    prompt_lengths: np.ndarray  # (S, Q)
    lengths: np.ndarray  # (S, Q)
    character_widths: np.ndarray  # (S,) of a sign, in the picture's width
    forms: np.ndarray | None = None  # (S, 2) rows and columns of tokens, if they differ

    def __len__(self) -> int:
        return len(self.owner)

    @cached_property
    def by_form(self) -> list[np.ndarray]:
        """The scenes of each form there is."""
        assert self.forms is not None
        forms = self.forms.astype(np.int64) @ (1, 1000)
        return [np.flatnonzero(forms == form) for form in np.unique(forms)]

    @cached_property
    def sharpness(self) -> np.ndarray:
        """The part of a token that a character is wide, in quarters, `(S,)`: 4 unless scaled."""
        if self.forms is None:
            return np.full(len(self), 4)
        quarters: np.ndarray = (4 * self.character_widths * self.forms[:, 1]).round().clip(1, 4)
        return quarters


def load_pool(folder: Path, num_scenes: int, canvas: Canvas, split: AnySplit = "train") -> Pool:
    """Return the pool, drawing it first if no file of this recipe and size exists."""
    path = folder / f"pool-{split}-{num_scenes}-{canvas.name}-{_recipe(canvas, split)}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        starts = range(0, num_scenes, _CHUNK)
        jobs = [(s, min(s + _CHUNK, num_scenes), canvas, split) for s in starts]
        with ProcessPoolExecutor(os.cpu_count(), initializer=_be_nice) as workers:
            chunks = list(
                tqdm(workers.map(_draw_chunk, jobs), total=len(jobs), desc=f"drawing {split}")
            )
        arrays = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
        temporary = path.with_suffix(".tmp.npz")
        np.savez(temporary, **arrays)
        temporary.rename(path)
    with np.load(path) as stored:
        return Pool(**{f.name: stored[f.name] for f in fields(Pool) if f.name in stored})


def patch_owners(scene: Scene, rows: int, columns: int | None = None) -> np.ndarray:
    """Return for each patch of a `rows` x `columns` picture the item that covers it, `(N,)`.

    An item owns the patches it covers to three tenths, and always the one it covers most; patches
    it only touches are UNCLEAR.
    """
    columns = columns or rows
    owner = np.full((rows, columns), BACKGROUND, dtype=np.int8)
    for index, item in enumerate(scene.items):
        spans = []
        for center, size, grid in (
            (item.y, item.height, rows),
            (item.x, item.width, columns),
        ):
            edges = np.arange(grid + 1)
            low, high = (center - size / 2) * grid, (center + size / 2) * grid
            overlap = np.minimum(high, edges[1:]) - np.maximum(low, edges[:-1])
            spans.append(np.clip(overlap, 0, 1))
        cover = spans[0][:, None] * spans[1][None]
        owner[(cover > 0.02) & (owner == BACKGROUND)] = UNCLEAR
        owner[(cover >= 0.3) | (cover == cover.max())] = index
    return owner.reshape(-1)


def question_tokens(
    tokenizer: PreTrainedTokenizerFast, text: str, answer: str
) -> tuple[list[int], int]:
    """Return what follows the image in the chat format, and how much of it is the prompt."""
    prompt: list[int] = tokenizer(f"\n{text}\nASSISTANT:\n").input_ids
    return prompt + tokenizer(f"{answer}</s>").input_ids, len(prompt)


def _be_nice() -> None:
    os.nice(19 - os.nice(0))


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def _recipe(canvas: Canvas, split: AnySplit) -> str:
    """Name what the code makes of the first scenes, so that a change of it makes a new pool."""
    sample = _draw_chunk((0, 8, canvas, split))
    return hashlib.sha256(b"".join(array.tobytes() for array in sample.values())).hexdigest()[:10]


def _draw_chunk(job: tuple[int, int, Canvas, AnySplit]) -> dict[str, np.ndarray]:
    first, last, canvas, split = job
    kinds = FINE_KINDS if split == FINE else KINDS
    max_items = MAX_FINE_ITEMS if split == FINE else MAX_ITEMS
    number, num_questions = last - first, _QUESTIONS_PER_KIND * len(kinds)
    chunk: dict[str, np.ndarray] = {
        "pixels": np.zeros((number, *canvas.pixels_shape), np.uint8),
        "owner": np.full((number, canvas.max_tokens), UNCLEAR, np.int8),
        "colors": np.full((number, max_items), -1, np.int8),
        "names": np.full((number, max_items), -1, np.int8),
        "characters": np.full((number, max_items, MAX_CODE), -1, np.int8),
        "centers": np.zeros((number, max_items, 2), np.float32),
        "kinds": np.full((number, num_questions), -1, np.int8),
        "tokens": np.zeros((number, num_questions, _MAX_QUESTION_TOKENS), np.int16),
        "prompt_lengths": np.zeros((number, num_questions), np.int16),
        "lengths": np.zeros((number, num_questions), np.int16),
        "character_widths": np.zeros(number, np.float32),
    }
    forms = np.zeros((number, 2), np.int8)
    for row, index in enumerate(range(first, last)):
        scene, picture = _draw(index, split)
        chunk["character_widths"][row] = scene.character_width
        pixels = canvas.arrange(picture)
        chunk["pixels"][row, : len(pixels)] = pixels
        forms[row] = rows, columns = canvas.form(*picture.size)
        chunk["owner"][row, : rows * columns] = patch_owners(scene, rows, columns)
        for place, item in enumerate(scene.items):
            chunk["colors"][row, place] = COLORS.index(item.color)
            chunk["names"][row, place] = NAMES.index(item.name)
            chunk["centers"][row, place] = item.x, item.y
            for position, character in enumerate(item.code):
                chunk["characters"][row, place, position] = CHARACTERS.index(character)
        _ask(scene, chunk, row, kinds)
    if canvas.has_forms:
        chunk["forms"] = forms
    return chunk


def _draw(index: int, split: AnySplit) -> tuple[Scene, Image.Image]:
    """Return a scene and its picture; among fine ones some are as usual, at their usual size."""
    if split != FINE:
        scene = sample_scene(index, split)
        return scene, draw_scene(scene)
    if index % _USUAL_EVERY:
        scene = sample_fine(index, training=True)
        return scene, draw_scene(scene)
    scene = sample_scene(index)
    return scene, at_usual_size(draw_scene(scene))


def at_usual_size(picture: Image.Image) -> Image.Image:
    """Scale a picture as the model that knows one size has it scaled."""
    rows, columns = CANVAS.form(*picture.size)
    side = 2 * CANVAS.patch
    return picture.resize((columns * side, rows * side), Image.Resampling.BICUBIC)


def _ask(scene: Scene, chunk: dict[str, np.ndarray], row: int, kinds: tuple[str, ...]) -> None:
    rng = np.random.default_rng([scene.seed, 3])
    for place in range(_QUESTIONS_PER_KIND * len(kinds)):
        kind = place % len(kinds)
        question = ask(scene, kinds[kind], rng)
        if question is None:
            continue
        tokens, prompt_length = question_tokens(_tokenizer(), question.text, question.answer)
        chunk["kinds"][row, place] = kind
        chunk["tokens"][row, place, : len(tokens)] = tokens
        chunk["prompt_lengths"][row, place] = prompt_length
        chunk["lengths"][row, place] = len(tokens)

"""Panels: pictures with discarded patches greyed out, and maps of the encoder's updates."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from PIL import Image

from benchmarks.quality.questions import Question

_FADE = 0.82  # how much of a discarded patch turns light grey
_LIGHT = 238
_RIGHT, _WRONG = "#15803d", "#c1121f"
_CELL = 16  # pixels per token


@dataclass(frozen=True, slots=True)
class KeptPanel:
    """What one method keeps for a question, and what the model then says."""

    method: str
    answer: str
    grid: tuple[int, int]
    kept: list[int]


@dataclass(frozen=True, slots=True)
class KeptRow:
    """One picture with one question, unpruned and by several methods."""

    picture: Image.Image
    question: Question
    unpruned_answer: str
    panels: tuple[KeptPanel, ...]


@dataclass(frozen=True, slots=True)
class UpdateMaps:
    """How far each token of one picture moves, by layer and over the saliency window."""

    picture: Image.Image
    updates: list[np.ndarray]
    saliency: np.ndarray
    window: tuple[int, int]


def grey_out(picture: Image.Image, grid: tuple[int, int], kept: Sequence[int]) -> Image.Image:
    """Return the picture with the patches of discarded tokens greyed out, as the paper draws it."""
    rows, columns = grid
    resized = picture.convert("RGB").resize(
        (columns * _CELL, rows * _CELL), Image.Resampling.LANCZOS
    )
    pixels = np.asarray(resized, dtype=np.float32)
    is_kept = np.zeros(rows * columns, dtype=bool)
    is_kept[list(kept)] = True
    mask = np.kron(is_kept.reshape(rows, columns), np.ones((_CELL, _CELL), dtype=bool))
    grey = pixels.mean(axis=-1, keepdims=True)
    faded = (1 - _FADE) * grey + _FADE * _LIGHT
    return Image.fromarray(np.where(mask[..., None], pixels, faded).astype(np.uint8))


def kept_figure(rows: Sequence[KeptRow]) -> Figure:
    """Draw one row per picture: itself, then what each method keeps, with question and answers."""
    num_columns = 1 + max(len(row.panels) for row in rows)
    # The first row also carries the names of the methods.
    heights = [2.32] + [2.13] * (len(rows) - 1)
    figure = Figure(figsize=(1.75 * num_columns, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(rows), 1, squeeze=False, height_ratios=heights)[:, 0]
    for number, (part, row) in enumerate(zip(parts, rows, strict=True)):
        text = "  ".join(row.question.text.split("\n"))
        part.suptitle(
            f"{text}   →   {row.question.answer}", x=0.012, ha="left", fontsize=9, weight="bold"
        )
        axes = part.subplots(1, num_columns, squeeze=False)[0]
        grid = row.panels[0].grid if row.panels else (12, 12)
        everything = range(grid[0] * grid[1])
        shown = [("all tokens", row.unpruned_answer, grey_out(row.picture, grid, everything))]
        shown += [
            (
                f"{panel.method} ({len(panel.kept)})",
                panel.answer,
                grey_out(row.picture, panel.grid, panel.kept),
            )
            for panel in row.panels
        ]
        for axis, (title, answer, image) in zip(axes, shown, strict=False):
            axis.imshow(image, interpolation="nearest")
            _bare(axis)
            if number == 0:
                axis.set_title(title, fontsize=9)
            is_right = answer == row.question.answer
            axis.set_xlabel(
                f"{'✓' if is_right else '✗'} {answer or '(nothing)'}",
                color=_RIGHT if is_right else _WRONG,
                fontsize=9,
                labelpad=3,
            )
    return figure


def update_figure(rows: Sequence[UpdateMaps], max_maps: int = 12) -> Figure:
    """Draw one row per picture: itself, the update of each layer, and the saliency.

    Each map has its own scale, from nothing to its 99th percentile, so that one sink does not
    hide the rest. Layers inside the saliency window are framed.
    """
    num_layers = len(rows[0].updates)
    layers = np.unique(
        np.linspace(0, num_layers - 1, min(num_layers, max_maps)).round().astype(int)
    )
    start, end = rows[0].window
    num_columns = len(layers) + 2
    layout = ConstrainedLayoutEngine(w_pad=0.015, h_pad=0.015, wspace=0.01, hspace=0.01)
    figure = Figure(figsize=(0.98 * num_columns, len(rows) + 0.25), layout=layout)
    grid = figure.subplots(len(rows), num_columns, squeeze=False)
    for number, (axes, row) in enumerate(zip(grid, rows, strict=True)):
        height, width = row.saliency.shape
        picture = row.picture.resize((width * _CELL, height * _CELL), Image.Resampling.LANCZOS)
        axes[0].imshow(picture)
        named = [(f"{n} → {n + 1}", row.updates[n], start <= n < end) for n in layers]
        named.append((f"u: {start} → {end}", row.saliency, True))
        for axis, (title, values, is_in_window) in zip(axes[1:], named, strict=True):
            high = max(float(np.percentile(values, 99)), 1e-9)
            axis.imshow(values, cmap="magma", vmin=0, vmax=high, interpolation="nearest")
            if number == 0:
                axis.set_title(title, fontsize=8)
            if is_in_window:
                for spine in axis.spines.values():
                    spine.set(color=_WRONG, linewidth=1.6)
        for axis in axes:
            _bare(axis, keep_frame=axis is not axes[0])
    grid[0][0].set_title("picture", fontsize=8)
    return figure


def _bare(axis: Axes, keep_frame: bool = False) -> None:
    axis.set_xticks([])
    axis.set_yticks([])
    if not keep_frame:
        for spine in axis.spines.values():
            spine.set_visible(False)

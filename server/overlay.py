"""The picture of an explanation: what was discarded is greyed out, as in the paper's figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from PIL import Image, ImageEnhance

_CELL = 14
_GAP = 8
_FADE = (235, 235, 235)
_FADE_OPACITY = 0.78


def draw_overlay(tiles: Sequence[Mapping[str, Any]]) -> bytes:
    """Draw the tiles of an explanation, one image per row, as a PNG."""
    rows: dict[int, list[Image.Image]] = {}
    for tile in tiles:
        rows.setdefault(tile["index"], []).append(draw_tile(tile))
    width = max(sum(panel.width + _GAP for panel in row) - _GAP for row in rows.values())
    height = sum(max(panel.height for panel in row) + _GAP for row in rows.values()) - _GAP
    canvas = Image.new("RGB", (width, height), "white")
    top = 0
    for row in rows.values():
        left = 0
        for panel in row:
            canvas.paste(panel, (left, top))
            left += panel.width + _GAP
        top += max(panel.height for panel in row) + _GAP
    with BytesIO() as file:
        canvas.save(file, "PNG")
        return file.getvalue()


def draw_picture(tile: Mapping[str, Any]) -> bytes:
    """Draw what the encoder saw of a tile, as a PNG."""
    with BytesIO() as file:
        _picture(tile).save(file, "PNG")
        return file.getvalue()


def draw_tile(tile: Mapping[str, Any]) -> Image.Image:
    """Draw what the encoder saw, with the patches of the discarded tokens greyed out."""
    grid_rows, grid_columns = tile["grid"]
    picture = _picture(tile)
    kept = Image.new("L", (grid_columns, grid_rows), 0)
    cells = kept.load()
    assert cells is not None
    for index in tile["kept"]:
        cells[index % grid_columns, index // grid_columns] = 255
    grey = ImageEnhance.Color(picture).enhance(0.0)
    faded = Image.blend(grey, Image.new("RGB", picture.size, _FADE), _FADE_OPACITY)
    mask = kept.resize(picture.size, Image.Resampling.NEAREST)
    return Image.composite(picture, faded, mask)


def _picture(tile: Mapping[str, Any]) -> Image.Image:
    """The tile's picture at a whole number of pixels per token."""
    grid_rows, grid_columns = tile["grid"]
    size = (grid_columns * _CELL, grid_rows * _CELL)
    stored = tile.get("picture")
    if stored is None:
        return Image.new("RGB", size, "steelblue")
    picture = Image.frombytes("RGB", (stored["width"], stored["height"]), stored["pixels"])
    return picture.resize(size, Image.Resampling.LANCZOS)

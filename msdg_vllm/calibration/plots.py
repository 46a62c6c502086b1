"""Plots as SVG and PNG text that a page holds inside itself: no library, no network."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

WIDTH, HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 12, 14, 34
BLUE, ORANGE, GREEN, GREY = "#2563eb", "#d97706", "#059669", "#6b7280"


@dataclass(frozen=True, slots=True)
class Line:
    """One curve; `low` and `high` are the ends of its intervals."""

    label: str
    values: Sequence[float]
    color: str = BLUE
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over layers or windows.

    Attributes:
        lines: The curves.
        x_label: What the x axis counts.
        y_label: What the curves measure.
        levels: Dashed horizontal lines, by label.
        bands: Ranges of x that are marked, as (first, last, label, color).
        ticks: Labels of x; its numbers by default.
        percent: Whether y is a share.
    """

    lines: Sequence[Line]
    x_label: str
    y_label: str
    levels: dict[str, float] = field(default_factory=dict)
    bands: Sequence[tuple[float, float, str, str]] = ()
    ticks: Sequence[str] | None = None
    percent: bool = False

    def svg(self) -> str:
        """Return the chart as an SVG element."""
        count = max(len(line.values) for line in self.lines)
        every = [
            v for line in self.lines for v in (*line.values, *(line.low or ()), *(line.high or ()))
        ]
        low, high = min([*every, *self.levels.values()]), max([*every, *self.levels.values()])
        margin = 0.08 * (high - low) or 0.1
        low, high = low - margin, high + margin
        span = WIDTH - _LEFT - _RIGHT

        def x(value: float) -> float:
            return _LEFT + span * (value + 0.5) / count

        def y(value: float) -> float:
            return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (value - low) / (high - low)

        parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
        for first, last, label, color in self.bands:
            left, right = x(first - 0.4), x(last + 0.4)
            parts.append(
                f'<rect x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" '
                f'height="{HEIGHT - _TOP - _BOTTOM}" fill="{color}" opacity=".14"/>'
                f'<text x="{(left + right) / 2:.1f}" y="{_TOP - 3}" fill="{color}" '
                f'text-anchor="middle">{escape(label)}</text>'
            )
        for value in np.linspace(low + margin, high - margin, 4):
            text = f"{value:.0%}" if self.percent else f"{value:.3g}"
            parts.append(
                f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
                f'class="rule"/><text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" '
                f'text-anchor="end">{text}</text>'
            )
        for label, value in self.levels.items():
            parts.append(
                f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
                f'stroke="{GREY}" stroke-dasharray="4 4"/><text x="{WIDTH - _RIGHT}" '
                f'y="{y(value) - 4:.1f}" text-anchor="end">{escape(label)}</text>'
            )
        parts += [self._curve(line, x, y) for line in self.lines]
        step = -(-count // 16)
        for place in range(0, count, step):
            text = str(place) if self.ticks is None else self.ticks[place]
            parts.append(
                f'<text x="{x(place):.1f}" y="{HEIGHT - _BOTTOM + 15}" '
                f'text-anchor="middle">{escape(text)}</text>'
            )
        parts.append(
            f'<text x="{_LEFT + span / 2}" y="{HEIGHT - 3}" text-anchor="middle" '
            f'class="axis">{escape(self.x_label)}</text></svg>'
        )
        legend = "".join(
            f'<span><i style="background:{line.color}"></i>{escape(line.label)}</span>'
            for line in self.lines
        )
        caption = f"<figcaption>{escape(self.y_label)} {legend}</figcaption>"
        return f"<figure>{''.join(parts)}{caption}</figure>"

    def _curve(self, line: Line, x: Any, y: Any) -> str:
        points = " ".join(f"{x(n):.1f},{y(v):.1f}" for n, v in enumerate(line.values))
        marks = "".join(
            f'<circle cx="{x(n):.1f}" cy="{y(v):.1f}" r="2.6" fill="{line.color}"/>'
            for n, v in enumerate(line.values)
        )
        bars = ""
        if line.low is not None and line.high is not None:
            bars = "".join(
                f'<line x1="{x(n):.1f}" x2="{x(n):.1f}" y1="{y(a):.1f}" y2="{y(b):.1f}" '
                f'stroke="{line.color}" stroke-width="1.6" opacity=".5"/>'
                for n, (a, b) in enumerate(zip(line.low, line.high, strict=True))
            )
        stroke = f'stroke="{line.color}" fill="none" stroke-width="1.8"'
        return f'{bars}<polyline points="{points}" {stroke}/>{marks}'


def histogram_svg(values: NDArray[Any], threshold: float, x_label: str) -> str:
    """Return a histogram with counts on a logarithmic scale, and the threshold marked."""
    counts, edges = np.histogram(values, bins=60, range=(0, max(float(values.max()), threshold)))
    heights = np.log10(1 + counts) / max(float(np.log10(1 + counts.max())), 1e-9)
    span, floor = WIDTH - _LEFT - _RIGHT, HEIGHT - _BOTTOM
    top = floor - _TOP
    bars = "".join(
        f'<rect x="{_LEFT + span * n / 60:.1f}" y="{floor - top * h:.1f}" '
        f'width="{span / 60 - 1:.1f}" height="{top * h:.1f}" '
        f'fill="{ORANGE if edges[n] >= threshold else BLUE}"/>'
        for n, h in enumerate(heights)
    )
    place = _LEFT + span * threshold / edges[-1]
    ticks = "".join(
        f'<text x="{_LEFT + span * part:.1f}" y="{floor + 15}" text-anchor="middle">'
        f"{edges[-1] * part:.3g}</text>"
        for part in (0, 0.25, 0.5, 0.75, 1)
    )
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{bars}'
        f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{_TOP}" y2="{floor}" stroke="{GREY}" '
        f'stroke-dasharray="4 4"/><text x="{place + 4:.1f}" y="{_TOP + 8}">threshold '
        f"{threshold:.4g}</text>{ticks}"
        f'<text x="{_LEFT + span / 2}" y="{HEIGHT - 3}" text-anchor="middle" class="axis">'
        f"{escape(x_label)}</text></svg>"
        "<figcaption>patches, logarithmic scale</figcaption></figure>"
    )


def picture_tag(png: bytes, title: str) -> str:
    """Return an image element that holds its picture."""
    data = base64.b64encode(png).decode()
    return f'<img alt="{escape(title)}" title="{escape(title)}" src="data:image/png;base64,{data}">'


def map_png(values: NDArray[Any]) -> bytes:
    """Return a map of how far tokens move: dark little, bright much; by rank, so that all show."""
    ranks = values.reshape(-1).argsort(kind="stable").argsort(kind="stable") / max(
        values.size - 1, 1
    )
    low, middle, high = (np.array(c) for c in ((13, 8, 60), (200, 60, 80), (252, 240, 160)))
    part = ranks[:, None]
    colors = np.where(
        part < 0.5, low + (middle - low) * 2 * part, middle + (high - middle) * (2 * part - 1)
    )
    shaped = colors.reshape(*values.shape, 3).round().astype(np.uint8)
    return png_of(Image.fromarray(shaped))


def kept_png(view: bytes, kept: NDArray[np.bool_]) -> bytes:
    """Return a picture in which the patches that are not kept are greyed out."""
    picture = Image.open(io.BytesIO(view)).convert("RGB")
    mask = Image.fromarray((255 * kept).astype(np.uint8)).resize(
        picture.size, Image.Resampling.NEAREST
    )
    grey = Image.blend(
        picture.convert("L").convert("RGB"), Image.new("RGB", picture.size, "white"), 0.72
    )
    return png_of(Image.composite(picture, grey, mask))


def png_of(picture: Image.Image) -> bytes:
    """Return the bytes of a PNG file."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()

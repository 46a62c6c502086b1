"""What a smaller image is: a coarser grid of means, or the largest grid of the same shape."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from tests.method_references.choice import Array, Choice


def pool_reference(x: Array, grids: Sequence[tuple[int, int]], budget: int) -> Choice:
    """Cut each grid into bands of rows and each band into cells; a cell's mean, at its middle."""
    out = Choice()
    total = sum(rows * columns for rows, columns in grids)
    start = 0
    for rows, columns in grids:
        end = start + rows * columns
        # Cells of all grids up to the end of one are its share of the budget, rounded down.
        cells = end * budget // total - start * budget // total
        bands = _num_bands(rows, columns, cells) if cells else 0
        for number, band in enumerate(_cut(rows, bands)):
            width = (number + 1) * cells // bands - number * cells // bands
            for cell in _cut(columns, width):
                members = [x[start + r * columns + c] for r in band for c in cell]
                finite = [row for row in members if np.isfinite(row).all()]
                out.keep.append(
                    start + band[(len(band) - 1) // 2] * columns + cell[(len(cell) - 1) // 2]
                )
                out.rows.append(sum(finite, np.zeros(x.shape[1])) / max(1, len(finite)))
        start = end
    return out


def _num_bands(rows: int, columns: int, cells: int) -> int:
    """As many as make cells nearly square, but none empty and none of more cells than columns."""
    bands = round((cells * rows / columns) ** 0.5)
    while bands * columns < cells:
        bands += 1
    return min(bands, rows, cells)


def _cut(length: int, parts: int) -> list[list[int]]:
    """Runs of whole places, as even as can be: part n starts at n * length // parts."""
    return [list(range(n * length // parts, (n + 1) * length // parts)) for n in range(parts)]


def scaled_grid_reference(rows: int, columns: int, most: int) -> tuple[int, int]:
    """Of all grids that fit, and that some scale gives by rounding down, the largest."""
    fitting = [
        (r, c)
        for r in range(1, rows + 1)
        for c in range(1, columns + 1)
        if r * c <= most and _share_a_scale(r, rows, c, columns)
    ]
    largest = max(r * c for r, c in fitting)
    # Of equally large ones the nearest in shape; of those, the widest.
    return min(
        ((r, c) for r, c in fitting if r * c == largest),
        key=lambda grid: (
            max(
                Fraction(grid[0] * columns, grid[1] * rows),
                Fraction(grid[1] * rows, grid[0] * columns),
            ),
            -grid[1],
        ),
    )


def _share_a_scale(r: int, rows: int, c: int, columns: int) -> bool:
    """Whether some scale in (0, 1] gives r of the rows and c of the columns, at least 1 each."""
    # Up to 2 / rows a scale gives one row: less than one is rounded up to it.
    low = max(Fraction(0 if r == 1 else r, rows), Fraction(0 if c == 1 else c, columns))
    high = min(Fraction(r + 1, rows), Fraction(c + 1, columns))
    return low < high and low <= 1

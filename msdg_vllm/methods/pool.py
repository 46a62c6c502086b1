"""Average pooling of the token grid: what a smaller image is to encoders of one resolution."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from msdg_vllm.core.signals import row_norms
from msdg_vllm.methods.image import Image, Selection
from msdg_vllm.methods.merging import group_means
from msdg_vllm.methods.method import Method
from msdg_vllm.methods.needs import Encoder, Needs


class Pool(Method):
    """The mean of the projected tokens of each cell of a coarser grid.

    The grid is cut into bands of rows and each band into cells, as evenly as whole tokens allow
    and nearly square; bands differ by at most one cell, so that there are exactly as many cells as
    the budget has tokens. A mean stands where the middle token of its cell stood. What is not
    finite is left out of it, and a cell of nothing else is zero. Waits for no device.
    """

    def needs(self, encoder: Encoder) -> Needs:
        return Needs(visual=True, merging=True)

    def select(self, image: Image, budget: int) -> Selection:
        device = image.visual.device
        cells, middles = [], []
        num_tokens = num_cells = 0
        for (rows, columns), share in _shares(image.grids or [(1, image.num_tokens)], budget):
            if share:
                cells.append(_cells(rows, columns, share, device) + num_cells)
                middles.append(_middles(rows, columns, share, device) + num_tokens)
            else:  # a frame, of more than the budget has tokens
                cells.append(torch.full((rows * columns,), budget, device=device))
            num_tokens += rows * columns
            num_cells += share
        cell = torch.cat(cells)
        tokens = image.visual.float()
        finite = row_norms(tokens).isfinite()
        means = group_means(
            tokens.masked_fill(~finite.unsqueeze(-1), 0.0),
            cell.masked_fill(~finite, budget),
            budget,
        )
        return Selection(
            torch.cat(middles),
            embeddings=means.to(image.visual.dtype),
            groups=cell.masked_fill(cell == budget, -1),
        )


def _shares(grids: Sequence[tuple[int, int]], budget: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Part a budget among grids, in proportion to their tokens and evenly along them."""
    total = sum(rows * columns for rows, columns in grids)
    seen = 0
    for rows, columns in grids:
        before = seen * budget // total
        seen += rows * columns
        yield (rows, columns), seen * budget // total - before


def num_bands(rows: int, columns: int, num_cells: int) -> int:
    """Return into how many bands of rows a grid is cut, so that its cells are nearly square."""
    nearest = round(math.sqrt(num_cells * rows / columns))
    return min(max(nearest, -(-num_cells // columns)), rows, num_cells)


def _cells(rows: int, columns: int, num_cells: int, device: torch.device) -> Tensor:
    """The cell of each token of a grid, `(rows * columns,)`."""
    place = torch.arange(rows * columns, device=device)
    bands = num_bands(rows, columns, num_cells)
    # Band k holds the rows from k * rows // bands on.
    band = ((place // columns + 1) * bands - 1) // rows
    start, width = _band(band, bands, num_cells)
    return start + ((place % columns + 1) * width - 1) // columns


def _middles(rows: int, columns: int, num_cells: int, device: torch.device) -> Tensor:
    """The token in the middle of each cell, `(num_cells,)` ascending."""
    bands = num_bands(rows, columns, num_cells)
    cell = torch.arange(num_cells, device=device)
    band = ((cell + 1) * bands - 1) // num_cells
    start, width = _band(band, bands, num_cells)
    row = (band * rows // bands + (band + 1) * rows // bands - 1) // 2
    within = cell - start
    column = (within * columns // width + (within + 1) * columns // width - 1) // 2
    return row * columns + column


def _band(band: Tensor, bands: int, num_cells: int) -> tuple[Tensor, Tensor]:
    """The first cell of each band, and how many it has."""
    start = band * num_cells // bands
    return start, (band + 1) * num_cells // bands - start

"""Where the foreground may be, without masks: what output features and borders say."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAX_CELLS = 900  # of a cut; a larger image is cut in cells of several tokens
_ITERATIONS = 200
_FAINT = 1e-3  # an edge between tokens that have nothing in common
_TINY = 1e-12
Array = NDArray[Any]


def foreground_cut(features: Array, grid: tuple[int, int], valid: Array) -> NDArray[np.bool_]:
    """Return the side of a normalised cut that touches the border less, `(n,)` of valid tokens.

    The cut is that of Shi and Malik over cosines of output features, from which the mean was
    taken: what all tokens share says nothing.

    Args:
        features: `(N, d)`.
        grid: Rows and columns.
        valid: `(N,)`, False for padding.
    """
    rows, columns = grid
    size = int(np.ceil(np.sqrt(rows * columns / _MAX_CELLS)))
    row, column = np.divmod(np.arange(rows * columns), columns)
    cells = ((row // size) * (-(-columns // size)) + column // size)[valid]
    _, cells = np.unique(cells, return_inverse=True)
    sums = np.zeros((cells.max() + 1, features.shape[1]))
    np.add.at(sums, cells, features[valid])
    affinity = np.maximum(_cosines(sums / np.bincount(cells)[:, None]), _FAINT)
    split = _second_eigenvector(affinity)[cells]
    side: NDArray[np.bool_] = split > split.mean()
    border = border_mask(grid, valid)
    if side[border].mean() > (~side)[border].mean():
        side = ~side
    return side


def border_mask(grid: tuple[int, int], valid: Array) -> NDArray[np.bool_]:
    """Tell which valid tokens lie on the border of the image, padding left out, `(n,)`."""
    shaped = valid.reshape(grid)
    inner = np.pad(shaped, 1)
    surrounded = inner[:-2, 1:-1] & inner[2:, 1:-1] & inner[1:-1, :-2] & inner[1:-1, 2:]
    border: NDArray[np.bool_] = (~surrounded).reshape(-1)[valid]
    return border


def border_distance(features: Array, grid: tuple[int, int], valid: Array) -> Array:
    """Return how unlike the border each valid token is: 1 - mean cosine to its nearest ten."""
    tokens = features[valid]
    cosines = _cosines(tokens)[:, border_mask(grid, valid)]
    nearest = np.sort(cosines, axis=1)[:, -10:]
    distance: Array = 1.0 - nearest.mean(axis=1)
    return distance


def auc(scores: Array, mask: NDArray[np.bool_]) -> float:
    """Return how often a token of the mask scores higher than one outside; 0.5 is chance."""
    inside, outside = int(mask.sum()), int((~mask).sum())
    if not inside or not outside:
        return 0.5
    ranks = _ranks(scores)
    return float((ranks[mask].sum() - inside * (inside - 1) / 2) / (inside * outside))


def rank_correlation(first: Array, second: Array) -> float:
    """Return Spearman's correlation; 0 where one of the two is constant."""
    ranks = np.stack([_ranks(first), _ranks(second)])
    spread = ranks.std(axis=1)
    if spread.min() < _TINY or np.ptp(first) == 0 or np.ptp(second) == 0:
        return 0.0
    centred = ranks - ranks.mean(axis=1, keepdims=True)
    return float((centred[0] * centred[1]).mean() / spread.prod())


def _ranks(values: Array) -> Array:
    order = np.argsort(values, kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(len(values))
    return ranks


def _cosines(vectors: Array) -> Array:
    centred = np.asarray(vectors, np.float32)
    centred = centred - centred.mean(axis=0)
    centred /= np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), _TINY)
    cosines: Array = centred @ centred.T
    return cosines


def _second_eigenvector(affinity: Array) -> Array:
    """Second eigenvector of the normalised graph Laplacian, by power iteration."""
    root = np.sqrt(affinity.sum(axis=1))
    normal = affinity / root[:, None] / root[None]
    first = root / np.linalg.norm(root)
    # Any start that is not the first eigenvector; this one is the same on every machine.
    vector = np.cos(np.arange(len(root), dtype=affinity.dtype) * 2.399963)
    for _ in range(_ITERATIONS):
        vector = vector - first * (first @ vector)
        vector = vector / max(float(np.linalg.norm(vector)), _TINY)
        vector = normal @ vector + vector  # + 1: the largest eigenvalues, not the most negative
    split: Array = vector / root
    return split

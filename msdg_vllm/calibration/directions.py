"""Directions: how well representations tell tokens of one class from those of others (AP)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msdg_vllm.calibration.masks import Annotation
from msdg_vllm.calibration.tower import Encoded, TowerInfo
from msdg_vllm.core.signals import row_norms, unit

# The paper's protocol: classes with eight labelled tokens; anchors inside at 70 % coverage.
_MIN_TOKENS = 8
_INTERIOR = 0.7
OUTPUT = "output features"
CENTRED = "output features less their mean"
Array = NDArray[Any]


def early_layers(info: TowerInfo) -> list[int]:
    """Return where directions may start: the paper's 2, and others of the first half."""
    return [layer for layer in (0, 2, 4, 6, 8) if layer < info.direction_end / 2 + 1]


def representations(encoded: Encoded, info: TowerInfo) -> dict[str, Array]:
    """Return unit vectors of tokens, `(N, d)`: output features and directions from early layers."""
    patches = info.patches_per_token

    def tokens(vectors: Any) -> Array:
        merged = unit(vectors, row_norms(vectors)).unflatten(0, (-1, patches)).mean(dim=1)
        array: Array = unit(merged, row_norms(merged)).cpu().numpy()
        return array

    output = encoded.states[-1].float()
    late = encoded.states[info.direction_end].float()
    late = unit(late, row_norms(late))
    made = {OUTPUT: tokens(output), CENTRED: tokens(output - output.mean(dim=0))}
    for layer in early_layers(info):
        early = encoded.states[layer].float()
        made[direction_name(layer, info)] = tokens(late - unit(early, row_norms(early)))
    return made


def direction_name(layer: int, info: TowerInfo) -> str:
    """Return how the table calls directions from a layer to the late one."""
    return f"direction {layer} → {info.direction_end}"


def average_precisions(
    vectors: Mapping[str, Array], annotation: Annotation, grid: tuple[int, int]
) -> tuple[dict[str, float], float, int]:
    """Score the retrieval of an anchor's class among the labelled tokens of one image.

    One anchor per class that has eight tokens: the interior token farthest from the border of its
    class, times coverage; without one, the token covered most.

    Returns:
        The mean AP over anchors of each representation, what chance gives, and how many anchors
        there were; NaN without any.
    """
    labels = annotation.labels
    labelled = np.flatnonzero(labels >= 0)
    scores: dict[str, list[float]] = {name: [] for name in vectors}
    chances = []
    for category in np.unique(labels[labelled]):
        members = labels == category
        others = labelled[labels[labelled] != category]
        if members.sum() < _MIN_TOKENS or not len(others):
            continue
        anchor = _anchor(members, annotation.cover, grid)
        candidates = labelled[labelled != anchor]
        positive = members[candidates]
        chances.append(positive.mean())
        for name, rows in vectors.items():
            order = np.argsort(-(rows[candidates] @ rows[anchor]), kind="stable")
            scores[name].append(_average_precision(positive[order]))
    if not chances:
        return dict.fromkeys(vectors, float("nan")), float("nan"), 0
    means = {name: float(np.mean(values)) for name, values in scores.items()}
    return means, float(np.mean(chances)), len(chances)


def _anchor(members: NDArray[np.bool_], cover: Array, grid: tuple[int, int]) -> int:
    interior = members & (cover >= _INTERIOR)
    if not interior.any():
        return int(np.argmax(np.where(members, cover, -1.0)))
    score = np.where(interior, _boundary_distance(members.reshape(grid)) * cover, -1.0)
    return int(np.argmax(score))


def _boundary_distance(mask: NDArray[np.bool_]) -> Array:
    """Steps from each token of a mask to the nearest token outside it, the image's end included."""
    distance = np.zeros(mask.shape)
    left = np.pad(mask, 1)
    while left.any():
        distance += left[1:-1, 1:-1]
        shrunk = left.copy()
        for shift in ((0, 1), (0, -1), (1, 0), (-1, 0)):
            shrunk &= np.roll(left, shift, axis=(0, 1))
        left = shrunk
    return distance.reshape(-1)


def _average_precision(hits: NDArray[np.bool_]) -> float:
    """AP of a ranking: the mean precision at each hit."""
    places = np.flatnonzero(hits)
    return float((np.arange(1, len(places) + 1) / (places + 1)).mean())

"""Findings: what speaks against a calibration, and what a user should know of the encoder."""

from collections.abc import Sequence

import numpy as np

from msdg_vllm.calibration.images import ENOUGH_IMAGES, num_near_duplicates
from msdg_vllm.calibration.looking import Floats, Record
from msdg_vllm.calibration.tower import TowerInfo
from msdg_vllm.calibration.window import Window

_UNSTABLE = 0.7
_POSITION = 0.3
_GROWTH = 4.0
_BACKGROUND_RECALL = 0.05  # below chance
_BACKGROUND_AUC = 0.45
_DUPLICATES = 0.05


def position_share(records: Sequence[Record]) -> Floats:
    """Return how much of u position explains in each window, 0 to 1, `(S,)`."""
    terms = np.sum([record["position_terms"] for record in records], axis=0)
    moves = np.sum([record["position_moves"] for record in records], axis=0)
    total = np.sum([record["position_total"] for record in records], axis=0)
    solved = np.linalg.lstsq(terms, moves.T, rcond=None)[0]
    share: Floats = (moves * solved.T).sum(axis=1) / np.maximum(total, 1e-12)
    return share


def background_layers(records: Sequence[Record], window: Window) -> list[int]:
    """Return the layers whose large updates lie on the background."""
    if window.layer_recall is not None:
        low = window.layer_recall.high < window.chance - _BACKGROUND_RECALL
    else:
        low = np.mean([record["layer_cut"] for record in records], axis=0) < _BACKGROUND_AUC
    return [int(layer) for layer in np.flatnonzero(low)]


def find_warnings(records: Sequence[Record], info: TowerInfo, window: Window) -> list[str]:
    """Say what makes this calibration doubtful: images first, then the encoder."""
    said = []
    if len(records) < ENOUGH_IMAGES:
        said.append(
            f"Only {len(records)} images were looked at; use {ENOUGH_IMAGES} or more, better 200."
        )
    if window.stability < _UNSTABLE:
        said.append(
            f"Of resamples of the images only {window.stability:.0%} choose this window or the one "
            "beside it: more images are needed."
        )
    duplicates = num_near_duplicates([record["fingerprint"] for record in records])
    if duplicates > _DUPLICATES * len(records):
        said.append(f"{duplicates} images look like another one: they count twice.")
    if len({tuple(record["size"].tolist()) for record in records}) == 1:
        width, height = records[0]["size"].tolist()
        said.append(f"All images are {width} x {height}; other forms were not seen.")
    if window.is_flat:
        said.append("All windows cover the foreground alike: the window does not matter.")
    if layers := background_layers(records, window):
        said.append(f"The updates of {_layers(layers)} lie mostly on the background.")
    means = np.mean([record["update_mean"] for record in records], axis=0)
    last = max(1, len(means) // 4)
    growth = float(means[-last:].max() / max(float(np.median(means[:-last])), 1e-12))
    if growth > _GROWTH:
        said.append(
            f"Updates grow towards the output, to {growth:.0f} times the usual: a window that "
            "reaches there lets few groups take the whole budget."
        )
    if info.global_layers is not None:
        seen = ", ".join(map(str, info.global_layers))
        said.append(
            f"Attention spans the image only in layers {seen}; windows that contain none of them "
            "see parts of it."
        )
    if window.chosen is not None:
        share = float(position_share(records)[window.chosen[0]])
        if share > _POSITION:
            said.append(
                f"Position alone explains {share:.0%} of u in the window: it may follow the frame "
                "more than the content."
            )
    return said


def _layers(layers: Sequence[int]) -> str:
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"

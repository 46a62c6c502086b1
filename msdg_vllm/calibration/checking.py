"""The second look: what a draft of the profile keeps of some images, beside simpler ways."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from msdg_vllm.calibration.coverage import (
    PROFILE,
    RETENTIONS,
    effective_groups,
    keep_by_all,
    measure,
)
from msdg_vllm.calibration.directions import average_precisions, representations
from msdg_vllm.calibration.looking import Record, moves_of
from msdg_vllm.calibration.masks import Annotation
from msdg_vllm.calibration.plots import png_of
from msdg_vllm.calibration.tower import Encoded, TowerInfo
from msdg_vllm.calibration.window import Curve, curve
from msdg_vllm.core.profiles import EncoderProfile

_THUMBNAIL = 224
Array = NDArray[Any]


def check(
    encoded: Encoded,
    draft: EncoderProfile,
    info: TowerInfo,
    scale: float,
    width: int,
    annotation: Annotation | None,
    view: Image.Image | None,
) -> Record:
    """Return what the draft does to one image.

    Args:
        encoded: The image after the tower.
        draft: The profile as the first look suggests it.
        info: The tower.
        scale: The `saliency_scale` that would give u a mean of 1.
        width: Updates in a window.
        annotation: What is where, if masks were given.
        view: The image as the tower sees it, if it shall be shown in the report.
    """
    kept = keep_by_all(encoded, draft, info, scale)
    record: Record = {"effective_groups": np.array(effective_groups(kept.signals))}
    if draft.sink_state is not None and draft.sink_coordinate is not None:
        column = encoded.states[draft.sink_state][:, draft.sink_coordinate]
        record["sink_values"] = column.abs().float().cpu().numpy()
    if annotation is not None:
        record["coverage_names"] = np.array(list(kept.tokens))
        record["coverage"] = np.array(
            [[measure(k, annotation, encoded.valid) for k in by] for by in kept.tokens.values()]
        )  # (ways, retentions, measures)
        vectors = representations(encoded, info)
        scores, chance, anchors = average_precisions(vectors, annotation, encoded.grid)
        record["ap_names"] = np.array([*scores, "chance"])
        record["ap"] = np.array([*scores.values(), chance])
        record["anchors"] = np.array(anchors)
    if view is not None:
        record["view"] = _png(view)
        moves = moves_of(encoded, width, info.patches_per_token)
        record["maps"] = _on_grid(moves.layers.cpu().numpy(), encoded).astype(np.float32)
        if draft.saliency_window is not None:
            window = moves.windows[draft.saliency_window[0] : draft.saliency_window[0] + 1]
            record["window_map"] = _on_grid(window.cpu().numpy(), encoded)[0].astype(np.float32)
        mask = np.zeros(len(encoded.valid), bool)
        mask[kept.tokens[PROFILE][len(RETENTIONS) - 1]] = True
        record["kept"] = mask.reshape(encoded.grid)
    return record


@dataclass(frozen=True, slots=True)
class Checks:
    """What the second look says, over all its images.

    Attributes:
        records: Those of the images.
        effective_groups: Mean number of groups that share the budget.
        coverage: By way of choosing, a curve over retentions and measures, `(9,)`; no masks: empty.
        ap: By representation, its mean AP over images and the interval, `(1,)`.
        anchors: How many anchors AP is made of.
    """

    records: Sequence[Record]
    effective_groups: float
    coverage: dict[str, Curve]
    ap: dict[str, Curve]
    anchors: int

    def gain(self, name: str, other: str) -> Curve | None:
        """Return how much more one way covers than another, as one number per image."""
        pairs = [_of(record, name) - _of(record, other) for record in self.records if _has(record)]
        if not pairs or name not in self.coverage or other not in self.coverage:
            return None
        return curve(np.array(pairs).reshape(-1, 1))


def summarize(records: Sequence[Record]) -> Checks:
    """Put together what the second look measured."""
    annotated = [record for record in records if _has(record)]
    coverage: dict[str, Curve] = {}
    if annotated:
        for name in annotated[0]["coverage_names"].tolist():
            rows = np.stack([_rows(record, name).reshape(-1) for record in annotated])
            coverage[name] = curve(rows)
    scored = [r for r in records if "ap" in r and int(r["anchors"]) > 0]
    ap: dict[str, Curve] = {}
    if scored:
        for place, name in enumerate(scored[0]["ap_names"].tolist()):
            ap[name] = curve(np.array([[record["ap"][place]] for record in scored]))
    return Checks(
        records=records,
        effective_groups=float(np.mean([record["effective_groups"] for record in records])),
        coverage=coverage,
        ap=ap,
        anchors=sum(int(record["anchors"]) for record in scored),
    )


def _has(record: Record) -> bool:
    """Whether an image has things and classes to cover."""
    return "coverage" in record and not np.isnan(record["coverage"]).any()


def _rows(record: Record, name: str) -> Array:
    rows: Array = record["coverage"][record["coverage_names"].tolist().index(name)]
    return rows


def _of(record: Record, name: str) -> float:
    """One number for what a way covers: the mean over retentions and measures."""
    if name not in record["coverage_names"].tolist():
        return float("nan")
    return float(_rows(record, name).mean())


def _on_grid(values: Array, encoded: Encoded) -> Array:
    """`(.., n)` of valid tokens to `(.., rows, columns)`, 0 where there is padding."""
    shaped = np.zeros((len(values), len(encoded.valid)), values.dtype)
    shaped[:, encoded.valid] = values
    return shaped.reshape(-1, *encoded.grid)


def _png(view: Image.Image) -> Array:
    """A small picture as the bytes of a PNG file."""
    small = view.copy()
    small.thumbnail((_THUMBNAIL, _THUMBNAIL))
    return np.frombuffer(png_of(small), np.uint8)

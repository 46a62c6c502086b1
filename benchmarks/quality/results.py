"""Results: right and wrong answers as estimates, and the JSON file that every table comes from.

A result file holds `entries`, one per split, name and retention, and `tables`, which say what of
it belongs together. A name is a method of the server or a variant of an ablation; the entry
called `unpruned` is what relative accuracy is relative to.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quality.cases import UNPRUNED, SceneId
from benchmarks.quality.questions import FINE_KINDS
from benchmarks.quality.scores import (
    accuracy_by_kind,
    estimate,
    overall_accuracy,
    relative_accuracy,
    resample,
)

UNPRUNED_NAME = "unpruned"
Setting = tuple[str, Fraction]  # a name and its retention


@dataclass(frozen=True, slots=True)
class Mark:
    """Whether one question was answered right in one setting."""

    scene: SceneId
    kind: str
    name: str
    retention: Fraction
    right: bool


@dataclass(frozen=True, slots=True)
class Table:
    """Which entries stand together.

    Attributes:
        title: What is compared.
        rows: What each row is called, and the name of its entries.
        default: The name of the method as it is.
        retentions: The blocks, in order.
        with_mean: Whether the mean relative accuracy over the blocks is shown too.
    """

    title: str
    rows: tuple[tuple[str, str], ...]
    default: str
    retentions: tuple[Fraction, ...]
    with_mean: bool = False


def summarise(marks: Iterable[Mark], reference: str | None) -> list[dict[str, Any]]:
    """Return one entry per split, name and retention, with intervals over scenes.

    `difference` is relative accuracy minus that of the `reference` at the same retention, on the
    same scenes.
    """
    by_split: dict[str, list[Mark]] = {}
    for mark in marks:
        by_split.setdefault(mark.scene.split, []).append(mark)
    return [
        entry
        for split, split_marks in by_split.items()
        for entry in _summarise_split(split, split_marks, reference)
    ]


def _summarise_split(
    split: str, marks: Sequence[Mark], reference: str | None
) -> list[dict[str, Any]]:
    row_of = {scene: row for row, scene in enumerate(dict.fromkeys(m.scene for m in marks))}
    seeds = np.array([scene.seed for scene in row_of])
    asked = {mark.kind for mark in marks}
    kinds = [kind for kind in FINE_KINDS if kind in asked]
    tables: dict[Setting, np.ndarray] = {}
    for mark in marks:
        setting = (mark.name, mark.retention)
        if setting not in tables:
            tables[setting] = np.full((len(row_of), len(kinds)), np.nan)
        tables[setting][row_of[mark.scene], kinds.index(mark.kind)] = mark.right
    weights = resample(len(row_of))
    by_kind = {setting: accuracy_by_kind(right, weights) for setting, right in tables.items()}
    whole = by_kind[UNPRUNED_NAME, UNPRUNED]
    relative = {setting: relative_accuracy(acc, whole) for setting, acc in by_kind.items()}
    entries = []
    for (name, retention), right in tables.items():
        accuracy = by_kind[name, retention]
        base = relative.get((reference, retention)) if reference and name != reference else None
        entries.append(
            {
                "split": split,
                "name": name,
                "retention": str(retention),
                "questions": int((~np.isnan(right)).sum()),
                "accuracy": {k: asdict(estimate(accuracy[:, i])) for i, k in enumerate(kinds)},
                "overall": asdict(estimate(overall_accuracy(right, weights))),
                "overall_by_seed": [
                    float(np.nanmean(right[seeds == seed])) for seed in np.unique(seeds)
                ],
                "relative": asdict(estimate(relative[name, retention])),
                "difference": None
                if base is None
                else asdict(estimate(relative[name, retention] - base)),
            }
        )
    return entries


def report(
    facts: Mapping[str, Any],
    marks: Iterable[Mark],
    tables: Sequence[Table],
    reference: str | None,
) -> dict[str, Any]:
    """Return the content of a result file."""
    return {
        **facts,
        "reference": reference,
        "tables": [
            {**asdict(table), "retentions": [str(part) for part in table.retentions]}
            for table in tables
        ],
        "entries": summarise(marks, reference),
    }


def write(results: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return results

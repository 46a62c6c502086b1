"""Groups: VTC-Bench's question, what a method answers that plain downsampling does not.

Of the questions that the unpruned model answers right, those that downsampling to the same budget
loses are group A, the others group B (Liao et al., 2025, arXiv 2510.07143). A method that is no
better than a smaller picture scores 0 on A; one that loses something else scores less on B.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any

import numpy as np

from benchmarks.quality.cases import UNPRUNED, SceneId
from benchmarks.quality.results import UNPRUNED_NAME, Mark
from benchmarks.quality.scores import estimate, overall_accuracy, resample

DOWNSAMPLING = ("resize", "pool")
"""Methods that can part the questions; the first that a server offers does."""


def grouped(
    marks: Iterable[Mark], baseline: str, splits: Sequence[str], usable: Mapping[str, set[str]]
) -> list[dict[str, Any]]:
    """Return, for each method and retention, its accuracy on A and on B, over all splits.

    Args:
        marks: All of them, the unpruned ones and those of the baseline included.
        baseline: The downsampling that parts the questions, at each retention anew.
        splits: Which scenes count.
        usable: Kinds of question that count, by split.
    """
    asked: dict[tuple[str, Fraction], dict[tuple[SceneId, str], bool]] = {}
    for mark in marks:
        if mark.scene.split in splits and mark.kind in usable[mark.scene.split]:
            setting = asked.setdefault((mark.name, mark.retention), {})
            setting[mark.scene, mark.kind] = mark.right
    whole = asked.get((UNPRUNED_NAME, UNPRUNED), {})
    if not whole:
        raise ValueError("the unpruned model answers no kind of question well enough to part them")
    answered = [question for question, right in whole.items() if right]
    scenes = {scene: row for row, scene in enumerate(dict.fromkeys(s for s, _ in whole))}
    weights = resample(len(scenes))
    entries = []
    for (name, retention), answers in asked.items():
        if name in (UNPRUNED_NAME, baseline):
            continue
        parted = asked[baseline, retention]
        groups = {
            "A": [question for question in answered if not parted[question]],
            "B": [question for question in answered if parted[question]],
        }
        entries.append(
            {
                "name": name,
                "retention": str(retention),
                **{
                    group: {
                        "questions": len(members),
                        **asdict(estimate(_accuracy(members, answers, scenes, weights))),
                    }
                    for group, members in groups.items()
                },
            }
        )
    return entries


def usable_kinds(entries: Iterable[Mapping[str, Any]], least: float = 0.8) -> dict[str, set[str]]:
    """Return, by split, the kinds that the unpruned model answers well enough to lose anything."""
    return {
        entry["split"]: {
            kind
            for kind, part in entry["accuracy"].items()
            if part["value"] is not None and part["value"] >= least
        }
        for entry in entries
        if entry["name"] == UNPRUNED_NAME
    }


def _accuracy(
    members: Sequence[tuple[SceneId, str]],
    answers: Mapping[tuple[SceneId, str], bool],
    scenes: Mapping[SceneId, int],
    weights: np.ndarray,
) -> np.ndarray:
    kinds = {kind: column for column, kind in enumerate(dict.fromkeys(k for _, k in members))}
    right = np.full((len(scenes), max(1, len(kinds))), np.nan)
    for scene, kind in members:
        right[scenes[scene], kinds[kind]] = answers[scene, kind]
    return overall_accuracy(right, weights)

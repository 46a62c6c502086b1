"""The saliency window: by the paper's rule, by masks, or by a vote of cues that need no masks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from msdg_vllm.calibration.looking import TOP_SHARE, Floats, Record
from msdg_vllm.calibration.sink_stage import Sinks

_RESAMPLES = 400
_BUFFER = 2  # from the last layer of the sink stage to the start: the paper leaves one layer out
_FLAT = 0.02  # windows within two points of recall are as good as each other
_CUES = ("cut", "border", "flip")
CUE_NAMES = {
    "cut": "agreement with a normalised cut of the output features (AUC)",
    "border": "correlation with the distance to border tokens",
    "flip": "stability under a mirror image",
}
_NO_SIGNAL = {"cut": 0.5, "border": 0.0, "flip": 0.0}

Source = Literal["paper", "scan", "vote", "off"]
Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True)
class Curve:
    """A mean over images for each window, with a 95 % interval from resampling images."""

    mean: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True, slots=True)
class Window:
    """The window, why, and how sure.

    Attributes:
        chosen: First and last state; None when saliency is better left out.
        source: What decided.
        reasons: The measurements behind it, in words.
        confidence: How far to trust it.
        stability: Share of resamples of the images that choose this window or the one beside it.
        recall: Foreground recall of each window, from masks.
        layer_recall: The same of each single layer.
        cues: The mask-free cues of each window.
        chance: Recall of tokens taken at random; `centre`: of those in the middle of the image.
    """

    chosen: tuple[int, int] | None
    source: Source
    reasons: tuple[str, ...]
    confidence: Confidence
    stability: float
    recall: Curve | None
    layer_recall: Curve | None
    cues: dict[str, Curve]
    chance: float = TOP_SHARE
    centre: float | None = None

    @property
    def is_flat(self) -> bool:
        """Whether all windows cover the foreground alike."""
        return self.recall is not None and float(np.ptp(self.recall.mean)) < _FLAT


def choose_window(records: Sequence[Record], sinks: Sinks, width: int) -> Window:
    """Return the saliency window of `width` updates.

    With sinks it is the paper's rule, and what masks or cues say against it is told. Without, the
    scan over masks decides; without masks, the vote.
    """
    recalls = _stacked(records, "recall")
    layer_recalls = _stacked(records, "layer_recall")
    cues = {name: _stacked(records, name) for name in _CUES}
    curves = {name: curve(values) for name, values in cues.items() if len(values)}
    scan = curve(recalls) if len(recalls) else None
    measured = {
        "recall": scan,
        "layer_recall": curve(layer_recalls) if len(layer_recalls) else None,
        "cues": curves,
        "centre": _mean(records, "centre_recall"),
        "chance": _mean(records, "chance_recall") or TOP_SHARE,
    }

    def window(
        start: int | None,
        source: Source,
        reasons: Sequence[str],
        confidence: Confidence,
        stability: float,
    ) -> Window:
        chosen = None if start is None else (start, start + width)
        return Window(chosen, source, tuple(reasons), confidence, stability, **measured)  # type: ignore[arg-type]

    num_starts = len(records[0]["window_mean"])
    voted, vote_stability = _resampled(list(cues.values()), vote)
    if sinks.stage is not None:
        return window(*_by_the_paper(sinks.stage[1], num_starts, recalls, voted, width))
    if scan is not None:
        best, stability = _resampled([recalls], lambda means: int(np.argmax(means[0])))
        reasons = [
            f"Masks decide: the most moved 30 % of tokens over {best} → {best + width} cover "
            f"{scan.mean[best]:.1%} of an instance on average (95 % interval {scan.low[best]:.1%} "
            f"to {scan.high[best]:.1%}; at random {TOP_SHARE:.0%})."
        ]
        if scan.low[best] <= TOP_SHARE:
            reasons.append("That is no better than chance: saliency is left out.")
            return window(None, "off", reasons, "high" if stability >= 0.9 else "medium", stability)
        if np.ptp(scan.mean) < _FLAT:
            reasons.append("All windows are within two points: the window does not matter.")
        if abs(voted - best) > 1:
            reasons.append(
                f"The cues that need no masks would have taken {voted} → {voted + width}, "
                f"{scan.mean[best] - scan.mean[voted]:.1%} lower."
            )
        confidence: Confidence = "low" if stability < 0.7 else "medium"
        if stability >= 0.9 and len(recalls) >= 64:
            confidence = "high"
        return window(best, "scan", reasons, confidence, stability)
    reasons, agreed = _describe_vote(voted, width, curves)
    if not agreed:
        reasons.append("The cues disagree, so saliency is left out until masks can decide.")
        return window(None, "off", reasons, "low", vote_stability)
    confidence = "medium" if vote_stability >= 0.7 else "low"
    return window(voted, "vote", reasons, confidence, vote_stability)


def vote(means: Sequence[Floats]) -> int:
    """Return the window with the best sum of ranks over cues; the earlier of two that are equal."""
    ranks = [np.argsort(np.argsort(values, kind="stable"), kind="stable") for values in means]
    return int(np.argmax(np.sum(ranks, axis=0)))


def curve(values: Floats) -> Curve:
    """Return means over images, `(S,)` from `(n, S)`, and where resampled means lie."""
    picks = _picks(len(values))
    means = np.stack([values[pick].mean(axis=0) for pick in picks])
    low, high = np.quantile(means, [0.025, 0.975], axis=0)
    return Curve(values.mean(axis=0), low, high)


def _by_the_paper(
    stage_end: int, num_starts: int, recalls: Floats, voted: int, width: int
) -> tuple[int, Source, list[str], Confidence, float]:
    """The rule of the paper: one layer is left out after the sink stage."""
    start = stage_end + _BUFFER
    reasons = [
        f"The paper's rule: one layer is left out after the sink stage, which ends with layer "
        f"{stage_end}, then {width} updates."
    ]
    confidence: Confidence = "medium"
    if start >= num_starts:
        start = num_starts - 1
        reasons.append("That would reach past the last state, so the window is the last one.")
        confidence = "low"
    if not len(recalls):
        if abs(voted - start) > 1:
            reasons.append(
                f"Cues that need no masks would take {voted} → {voted + width}; the rule stays, "
                "because the paper found it better than windows of higher recall."
            )
        return start, "paper", reasons, confidence, 1.0
    best = int(np.argmax(recalls.mean(axis=0)))
    gap = curve(recalls[:, [best]] - recalls[:, [start]])
    if gap.low[0] > _FLAT:
        confidence = "low"
        reasons.append(
            f"The masks disagree: {best} → {best + width} covers {gap.mean[0]:.1%} more of an "
            f"instance (at least {gap.low[0]:.1%}). Compare both windows on your task."
        )
    elif confidence == "medium":
        confidence = "high"
        reasons.append("The masks agree: no window is more than two points better.")
    return start, "paper", reasons, confidence, 1.0


def _describe_vote(start: int, width: int, curves: dict[str, Curve]) -> tuple[list[str], bool]:
    """What each cue says about the window of the vote, and whether all speak for it."""
    reasons = [
        f"No masks were given and no sinks found: a vote of cues takes {start} → {start + width}. "
        "It is not validated."
    ]
    agreed = True
    for name, cue in curves.items():
        place = int((cue.mean > cue.mean[start]).sum()) + 1
        speaks_for = cue.low[start] > _NO_SIGNAL[name] and place <= max(1, len(cue.mean) // 2)
        agreed = agreed and bool(speaks_for)
        reasons.append(
            f"{CUE_NAMES[name]}: {cue.mean[start]:.2f}, place {place} of {len(cue.mean)}"
            f"{'' if speaks_for else ', which speaks against it'}."
        )
    return reasons, agreed


def _resampled(
    values: Sequence[Floats], choose: Callable[[Sequence[Floats]], int]
) -> tuple[int, float]:
    """What is chosen from the means, and how often resampled images choose it or its neighbour."""
    present = [array for array in values if len(array)]
    chosen = choose([array.mean(axis=0) for array in present])
    drawn = zip(*(_picks(len(array)) for array in present), strict=True)
    near = [
        abs(choose([a[pick].mean(axis=0) for a, pick in zip(present, picks, strict=True)]) - chosen)
        <= 1
        for picks in drawn
    ]
    return chosen, float(np.mean(near))


def _picks(number: int) -> NDArray[np.int64]:
    """Images of each resample, `(R, n)`; the same in every run."""
    return np.random.default_rng(0).integers(number, size=(_RESAMPLES, number))


def _stacked(records: Sequence[Record], name: str) -> Floats:
    """A statistic of the images that have it, `(n, S)`."""
    present = [record[name] for record in records if name in record]
    usable = [values for values in present if not np.isnan(values).any()]
    return np.stack(usable).astype(np.float64) if usable else np.zeros((0, 1))


def _mean(records: Sequence[Record], name: str) -> float | None:
    present = [float(record[name]) for record in records if name in record]
    return float(np.nanmean(present)) if present else None

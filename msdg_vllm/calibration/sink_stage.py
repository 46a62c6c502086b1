"""Sinks: the layer where a few tokens move away from all others, and how to tell them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from msdg_vllm.calibration.looking import LOW_ENTROPY, Floats, Record

# An image has sinks at a layer when the largest update is this many times the median one. The
# paper draws its line at 5 and 10; what counts here is that sinks show in most images, at one
# coordinate. Encoders without sinks were seen to stay below 2.7.
_RATIO = 3.0
_MOST_IMAGES = 0.6
_SOME_IMAGES = 0.1
_ONE_COORDINATE = 0.8  # of the concentrated tokens agree
_STAGE = 0.5  # of the peak: layers beside it with at least this ratio belong to the stage
_CLEAR = 2.0  # sinks lie this many times above all others: the threshold does not matter much

Verdict = Literal["found", "none", "several coordinates", "too few images"]


@dataclass(frozen=True, slots=True)
class Sinks:
    """What was found about sinks.

    Attributes:
        verdict: Whether there are sinks that one coordinate tells.
        reasons: The measurements behind it, in words.
        ratios: Image mean of the max-to-median update ratio, by layer.
        peak: The layer between the first and the last with the highest ratio.
        stage: First and last layer of the sink-dominated stage; None without sinks.
        coordinate: The diagnostic coordinate; None without sinks.
        threshold: A token with a larger absolute value there is a sink; None without sinks.
        separation: How many times larger sinks are than what is largest beside them.
        share_of_images: Images in which the peak layer moves tokens along one coordinate.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    ratios: Floats
    peak: int
    stage: tuple[int, int] | None = None
    coordinate: int | None = None
    threshold: float | None = None
    separation: float | None = None
    share_of_images: float = 0.0


def find_sinks(records: Sequence[Record]) -> Sinks:
    """Follow the paper's procedure and say how far it carries.

    The peak of the image-mean max-to-median update ratio; in the state after it, the entropy of
    the highest-norm tokens' activations; the coordinate on which the concentrated ones agree; a
    threshold between them and all others. The first and the last layer are no sink stage.
    """
    ratios = np.mean([record["ratio"] for record in records], axis=0)
    if len(ratios) < 3:
        return Sinks("none", ("The encoder has too few layers for a sink stage.",), ratios, 0)
    peak = 1 + int(np.argmax(ratios[1:-1]))
    reasons = [_describe_peak(ratios, peak)]
    votes: Counter[int] = Counter()
    holders: list[Record] = []
    for record in records:
        coordinates = _concentrated(record, peak)
        if coordinates and record["ratio"][peak] >= _RATIO:
            votes.update(coordinates)
            holders.append(record)
    share = len(holders) / len(records)
    if share < _SOME_IMAGES:
        reasons.append(
            f"Layer {peak} moves tokens far along a single coordinate in {share:.0%} of the images "
            "only: no sinks."
        )
        return Sinks("none", tuple(reasons), ratios, peak, share_of_images=share)
    reasons.append(
        f"Layer {peak} moves a few tokens far along a single coordinate in {share:.0%} of the "
        "images."
    )
    coordinate, count = votes.most_common(1)[0]
    agreement = count / votes.total()
    if agreement < _ONE_COORDINATE:
        several = ", ".join(f"{c} ({n / votes.total():.0%})" for c, n in votes.most_common(3))
        reasons.append(
            f"These tokens do not agree on it: coordinates {several}. One coordinate would miss "
            "many of them, so no threshold is written."
        )
        return Sinks("several coordinates", tuple(reasons), ratios, peak, share_of_images=share)
    if share < _MOST_IMAGES:
        reasons.append(
            f"That is fewer than {_MOST_IMAGES:.0%} of the images: not a stage of the encoder but "
            "something some images cause, so no threshold is written."
        )
        return Sinks("too few images", tuple(reasons), ratios, peak, share_of_images=share)
    first, last = _stage(ratios, peak)
    # Where sinks no longer show after the last layer of the stage, it ends earlier.
    while last > peak and not any(coordinate in _concentrated(r, last) for r in holders):
        last -= 1
    stage = first, last
    threshold, separation = _threshold(holders, stage[1], coordinate)
    reasons.append(
        f"{agreement:.0%} of these tokens agree on coordinate {coordinate}. In the state after "
        f"layer {stage[1]}, where the stage ends, sinks are {separation:.1f} times above what is "
        f"largest beside them{'' if separation >= _CLEAR else ', which is little'}."
    )
    if separation < 1:
        reasons.append("No threshold tells them apart, so none is written.")
        return Sinks("none", tuple(reasons), ratios, peak, share_of_images=share)
    return Sinks(
        "found", tuple(reasons), ratios, peak, stage, coordinate, threshold, separation, share
    )


def _describe_peak(ratios: Floats, peak: int) -> str:
    highest = int(np.argmax(ratios))
    text = (
        f"Between the first and the last layer the largest update exceeds the median one most at "
        f"layer {peak}, by {ratios[peak]:.1f} times (median over layers {np.median(ratios):.1f})."
    )
    if highest != peak:
        end = "first" if highest == 0 else "last"
        text += f" The {end} layer shows {ratios[highest]:.1f}, which is no sink stage."
    return text


def _concentrated(record: Record, layer: int) -> list[int]:
    """The coordinates of the concentrated ones among the high-norm tokens after a layer."""
    found = record["top_coordinate"][layer][_is_concentrated(record, layer)]
    return [int(coordinate) for coordinate in found]


def _is_concentrated(record: Record, layer: int) -> NDArray[np.bool_]:
    low: NDArray[np.bool_] = (
        record["top_entropy"][layer] < LOW_ENTROPY * record["usual_entropy"][layer]
    )
    return low


def _stage(ratios: Floats, peak: int) -> tuple[int, int]:
    """The layers around the peak that belong to it; the ends of the encoder never do."""
    bound = max(_STAGE * ratios[peak], 1.5 * float(np.median(ratios)))
    first = last = peak
    while first > 1 and ratios[first - 1] >= bound:
        first -= 1
    while last < len(ratios) - 2 and ratios[last + 1] >= bound:
        last += 1
    return first, last


def _threshold(records: Sequence[Record], layer: int, coordinate: int) -> tuple[float, float]:
    """The threshold, and how many times sinks lie above what is largest beside them."""
    sinks, others = [], []
    for record in records:
        here = record["top_coordinate"][layer][_is_concentrated(record, layer)] == coordinate
        values = record["top_value"][layer][_is_concentrated(record, layer)]
        sinks += values[here].tolist()
        if record["rest_coordinate"][layer] == coordinate:
            others.append(float(record["rest_value"][layer]))
    low_sink = float(np.quantile(sinks, 0.1))
    high_other = max(float(np.quantile(others, 0.9)) if others else 0.0, 1e-6)
    # Between two magnitudes the middle is the geometric one.
    return float(np.sqrt(low_sink * high_other)), low_sink / high_other

"""The profile: what both looks add up to, with where it comes from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msdg_vllm import __version__
from msdg_vllm.calibration.checking import Checks
from msdg_vllm.calibration.coverage import OUTPUT, PROFILE, SCALED, UNRANKED
from msdg_vllm.calibration.sink_stage import Sinks
from msdg_vllm.calibration.tower import TowerInfo
from msdg_vllm.calibration.window import Window
from msdg_vllm.core.profiles import EncoderProfile

_EARLY = 2  # the paper's early state of directions
_FEW_GROUPS = 0.5  # of K: with fewer sharing the budget the softmax has collapsed
_CLEARLY = 0.005  # half a point of coverage


def draft_profile(info: TowerInfo, sinks: Sinks, window: Window) -> EncoderProfile:
    """Return what the first look suggests, with the paper's values for all else."""
    late = info.direction_end
    profile = EncoderProfile(
        direction_layers=(min(_EARLY, late - 1), late),
        saliency_window=window.chosen,
        sink_layer=None if sinks.stage is None else sinks.stage[1],
        sink_coordinate=sinks.coordinate,
        output_layer=None if info.num_layers == late else info.num_layers,
    )
    if sinks.threshold is None:
        return profile
    return replace(profile, sink_threshold=_short(sinks.threshold))


@dataclass(frozen=True, slots=True)
class Settled:
    """The final profile.

    Attributes:
        profile: As it is written, without provenance.
        row: Which row of the coverage table it is.
        reasons: What the second look changed or confirmed, in words.
    """

    profile: EncoderProfile
    row: str
    reasons: tuple[str, ...]


def settle(draft: EncoderProfile, window: Window, checks: Checks, scale: float) -> Settled:
    """Return the profile after the second look.

    Masks decide whether u is scaled, left out, or groups are made of output features; without
    masks a collapsed softmax takes away a window that nothing validated.
    """
    if draft.saliency_window is None:
        return _grouped(Settled(draft, PROFILE, ()), checks)
    collapsed = checks.effective_groups < _FEW_GROUPS * draft.num_groups
    reasons = [
        f"With this window {checks.effective_groups:.1f} of {draft.num_groups} groups share the "
        f"budget{': the softmax over groups has collapsed' if collapsed else ''}."
    ]
    settled = Settled(draft, PROFILE, tuple(reasons))
    off = replace(draft, saliency_window=None)
    if collapsed:
        gain = checks.gain(SCALED, PROFILE)
        if gain is not None and gain.mean[0] > 0:
            reasons.append(
                f"saliency_scale {_short(scale):g} gives u a mean of 1 and covers "
                f"{gain.mean[0]:+.1%} (interval {gain.low[0]:+.1%} to {gain.high[0]:+.1%})."
            )
            scaled = replace(draft, saliency_scale=_short(scale))
            settled = Settled(scaled, SCALED, tuple(reasons))
        elif gain is None and window.source == "vote":
            reasons.append("Nothing validates the window, so saliency is left out.")
            return Settled(off, UNRANKED, tuple(reasons))
        elif gain is None:
            reasons.append(
                f'The paper\'s scale of 1 is kept; try "saliency_scale": {_short(scale):g}, which '
                "gives u a mean of 1."
            )
            settled = Settled(draft, PROFILE, tuple(reasons))
    lost = checks.gain(UNRANKED, settled.row)
    if lost is not None and lost.low[0] > 0:
        reasons.append(
            f"Groups with equal shares cover {lost.mean[0]:.1%} more without saliency (at least "
            f"{lost.low[0]:.1%}), so it is left out."
        )
        return Settled(off, UNRANKED, tuple(reasons))
    return _grouped(settled, checks)


def _grouped(settled: Settled, checks: Checks) -> Settled:
    """Group by output features where they clearly cover more than directions do."""
    gain = checks.gain(OUTPUT, PROFILE)
    if gain is None or settled.row != PROFILE or gain.low[0] <= _CLEARLY:
        return settled
    reason = (
        f"Groups of output features cover {gain.mean[0]:.1%} more than groups of directions (at "
        f"least {gain.low[0]:.1%}), so they are used."
    )
    profile = replace(settled.profile, grouping="output")
    return Settled(profile, OUTPUT, (*settled.reasons, reason))


def with_provenance(
    settled: Settled,
    info: TowerInfo,
    sinks: Sinks,
    window: Window,
    images: dict[str, int],
    warnings: Sequence[str],
) -> EncoderProfile:
    """Return the profile with what it was measured on and how far to trust it."""
    saliency = "off" if settled.profile.saliency_window is None else window.source
    provenance: dict[str, Any] = {
        "tool": f"msdg-vllm calibrate {__version__}",
        # Of a folder its name: where it lay says nothing to others.
        "model": Path(info.name).name if Path(info.name).is_dir() else info.name,
        "revision": info.revision,
        "encoder": {
            "type": info.model_type,
            "layers": info.num_layers,
            "width": info.width,
            "sha256": info.digest,
        },
        "images": images,
        "verdicts": {"sinks": sinks.verdict, "window": saliency},
        "validated_by_masks": window.recall is not None,
        "confidence": window.confidence,
        "stability": round(window.stability, 3),
        "warnings": list(warnings),
    }
    return replace(settled.profile, provenance=provenance)


def _short(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")

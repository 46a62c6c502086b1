"""Variants: the paper's ablations, for an encoder of any depth."""

from dataclasses import dataclass, field, replace
from fractions import Fraction

from benchmarks.quality.cases import RETENTIONS
from benchmarks.quality.results import Table
from msdg_vllm.core import SelectionOptions
from msdg_vllm.core.profiles import EncoderProfile

OURS = "Ours"
_GROUP_COUNTS = (8, 12, 16, 20, 24, 28)
_EARLY_ENDPOINTS = (0, 1, 2, 3)
_MAX_WINDOWS = 10
_THREE, _TWO = RETENTIONS[:3], RETENTIONS[1:3]


@dataclass(frozen=True, slots=True)
class Variant:
    """The method with one thing changed.

    Attributes:
        name: Its name; equal variants of several tables have one.
        label: What its table calls it.
        profile: The encoder's settings it uses.
        options: The parts of the method it uses.
    """

    name: str
    label: str
    profile: EncoderProfile
    options: SelectionOptions = field(default_factory=SelectionOptions)


@dataclass(frozen=True, slots=True)
class Ablation:
    """One table: variants in order, the method as it is among them."""

    title: str
    variants: tuple[Variant, ...]
    retentions: tuple[Fraction, ...]
    with_mean: bool = False

    def table(self) -> Table:
        rows = tuple((variant.label, variant.name) for variant in self.variants)
        return Table(self.title, rows, OURS, self.retentions, self.with_mean)


def ablations(profile: EncoderProfile, num_layers: int) -> list[Ablation]:
    """Return the paper's ablations around a profile of an encoder with `num_layers` layers."""
    return [
        Ablation("Components and staged selection", _components(profile), _THREE),
        Ablation("Signal assignment", _assignments(profile), _TWO),
        Ablation("Early endpoint of directions", _early_endpoints(profile), _THREE, True),
        Ablation("Late endpoint of directions", _late_endpoints(profile, num_layers), _THREE, True),
        Ablation("Number of groups", _group_counts(profile), _THREE, True),
        Ablation("Place of the saliency window", _windows(profile, num_layers), _TWO),
        Ablation("Width of the saliency window", _widths(profile, num_layers), _TWO),
    ]


def _components(profile: EncoderProfile) -> tuple[Variant, ...]:
    alone = SelectionOptions(grouping="none")
    changed = {
        OURS: SelectionOptions(),
        "Output features": SelectionOptions(grouping="output"),
        "Attention": SelectionOptions(saliency="given"),
        "Accumulated updates": SelectionOptions(saliency="accumulated"),
        "Keep sink tokens": SelectionOptions(sink_filter=False),
        "Size-based budget": SelectionOptions(budgets="size"),
        "Random": replace(alone, sink_filter=False, rank_by="random"),
        "Query (global)": replace(alone, rank_by="relevance"),
        "Query × visual (global)": alone,
    }
    return tuple(Variant(name, name, profile, options) for name, options in changed.items())


def _assignments(profile: EncoderProfile) -> tuple[Variant, ...]:
    by_query = SelectionOptions(allocate_by="relevance", rank_by="saliency")
    by_saliency = SelectionOptions(allocate_by="saliency", rank_by="relevance")
    return (
        Variant("α/u", "α allocates, u ranks", profile, by_query),
        Variant("u/α", "u allocates, α ranks", profile, by_saliency),
        Variant(OURS, OURS, profile),
    )


def _early_endpoints(profile: EncoderProfile) -> tuple[Variant, ...]:
    default, late = profile.direction_layers
    return tuple(
        _changed(profile, f"ℓ₀ = {early}", early == default, direction_layers=(early, late))
        for early in sorted({*_EARLY_ENDPOINTS, default})
        if early < late
    )


def _late_endpoints(profile: EncoderProfile, num_layers: int) -> tuple[Variant, ...]:
    early, default = profile.direction_layers
    ends = {num_layers - back: f"L−{back}" if back else "L" for back in range(4)}
    ends.setdefault(default, str(default))
    return tuple(
        _changed(profile, f"ℓ_d = {ends[late]}", late == default, direction_layers=(early, late))
        for late in sorted(ends, reverse=True)
        if late > early
    )


def _group_counts(profile: EncoderProfile) -> tuple[Variant, ...]:
    default = profile.num_groups
    return tuple(
        _changed(profile, f"K = {count}", count == default, num_groups=count)
        for count in sorted({*_GROUP_COUNTS, default})
    )


def _windows(profile: EncoderProfile, num_layers: int) -> tuple[Variant, ...]:
    """Windows of the default width from the encoder's input to its output."""
    assert profile.saliency_window is not None, "there is no window to move"
    default, end = profile.saliency_window
    width = end - default
    last = num_layers - width
    step = -(-(last + 1) // _MAX_WINDOWS)
    starts = sorted({*range(0, last + 1, step), default, last})
    return tuple(_window(profile, start, start + width) for start in starts)


def _widths(profile: EncoderProfile, num_layers: int) -> tuple[Variant, ...]:
    """Windows that begin where the default one does; the paper varies the width by two."""
    assert profile.saliency_window is not None, "there is no window to widen"
    start, end = profile.saliency_window
    widths = {end - start + change for change in (-2, -1, 0, 1, 2)}
    ends = sorted(start + width for width in widths if width > 0 and start + width <= num_layers)
    return tuple(_window(profile, start, end) for end in ends)


def _window(profile: EncoderProfile, start: int, end: int) -> Variant:
    window = (start, end)
    default = window == profile.saliency_window
    return _changed(profile, f"{start} → {end}", default, saliency_window=window)


def _changed(profile: EncoderProfile, name: str, is_default: bool, **fields: object) -> Variant:
    """The profile with other fields; what changes nothing is the method as it is."""
    if is_default:
        return Variant(OURS, f"{name} (ours)", profile)
    return Variant(name, name, replace(profile, **fields))  # type: ignore[arg-type]

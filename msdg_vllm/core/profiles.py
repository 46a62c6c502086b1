"""Encoder profiles: which layers, window and sink coordinate the method reads of an encoder."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from msdg_vllm.core.errors import ProfileError

Representation = Literal["direction", "output"]


def _ascending_pair(name: str, value: object) -> tuple[int, int]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ProfileError(f"{name} must be a pair of layers, got {value!r}")
    first, last = value
    _require_int(f"{name}[0]", first, minimum=0)
    _require_int(f"{name}[1]", last, minimum=0)
    if first >= last:
        raise ProfileError(f"{name} must go from an earlier to a later layer, got {value!r}")
    return first, last


def _require_int(name: str, value: object, *, minimum: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ProfileError(f"{name} must be an integer, got {value!r}")
    if minimum is not None and value < minimum:
        raise ProfileError(f"{name} must be at least {minimum}, got {value}")


def _finite_number(name: str, value: object, *, positive: bool) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0 or (positive and value == 0):  # type: ignore[arg-type, operator]
        bound = "> 0" if positive else ">= 0"
        raise ProfileError(f"{name} must be a finite number {bound}, got {value!r}")
    return float(value)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class EncoderProfile:
    """The settings of the method for one vision encoder, fixed across images and budgets.

    A layer index names the state that enters that layer: layer `l` is Hugging Face
    `hidden_states[l]`. The paper's method has a window, sinks, a scale of 1 and groups of update
    directions; `msdg-vllm calibrate` may find that an encoder does better without one of them.

    Attributes:
        direction_layers: The early and the late state of the update direction.
        saliency_window: The first and the last state of the saliency window; None turns saliency
            off: u is 1 for every token, so that only groups and the query decide.
        sink_layer: The layer with the highest max-to-median update ratio; sinks show in the
            state after it, `sink_layer + 1`. None: the encoder has no sinks, nothing is filtered.
        sink_coordinate: The coordinate of that state that tells sinks from other tokens; None
            if, and only if, `sink_layer` is.
        sink_threshold: A token is a sink when the absolute value there exceeds this.
        num_groups: K, the number of groups.
        seed: Decides the first centroid, the candidate number `seed mod M`.
        output_layer: The state handed to the projector, needed only to group by output
            features; None means the late direction layer.
        saliency_scale: u is multiplied by this, so that the softmax over groups can see values
            of order one whatever the encoder's norms are; 1 is the paper.
        grouping: What groups are formed of: update directions, as in the paper, or the
            encoder's output features.
        provenance: How the other values came about, as `msdg-vllm calibrate` writes it: JSON
            that no computation reads. Profiles that differ in nothing else are equal.
    """

    direction_layers: tuple[int, int]
    saliency_window: tuple[int, int] | None
    sink_layer: int | None
    sink_coordinate: int | None
    sink_threshold: float = 50.0
    num_groups: int = 20
    seed: int = 0
    output_layer: int | None = None
    saliency_scale: float = 1.0
    grouping: Representation = "direction"
    provenance: Mapping[str, Any] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("direction_layers", "saliency_window"):
            if name == "direction_layers" or self.saliency_window is not None:
                object.__setattr__(self, name, _ascending_pair(name, getattr(self, name)))
        if (self.sink_layer is None) != (self.sink_coordinate is None):
            raise ProfileError(
                "sink_layer and sink_coordinate must both be given or both be null, got "
                f"{self.sink_layer!r} and {self.sink_coordinate!r}"
            )
        for name in ("sink_layer", "sink_coordinate", "output_layer"):
            if getattr(self, name) is not None:
                _require_int(name, getattr(self, name), minimum=0)
        _require_int("num_groups", self.num_groups, minimum=1)
        _require_int("seed", self.seed, minimum=None)
        for name, positive in (("sink_threshold", False), ("saliency_scale", True)):
            number = _finite_number(name, getattr(self, name), positive=positive)
            object.__setattr__(self, name, number)
        if self.grouping not in get_args(Representation):
            allowed = list(get_args(Representation))
            raise ProfileError(f"grouping must be one of {allowed}, got {self.grouping!r}")
        if self.provenance is not None and not isinstance(self.provenance, Mapping):
            raise ProfileError(f"provenance must be a JSON object, got {self.provenance!r}")

    @property
    def layers(self) -> tuple[int, ...]:
        """The sorted layers whose input states the method needs, `sink_layer + 1` among them."""
        grouped = self.direction_layers if self.grouping == "direction" else (self.features_layer,)
        sinks = () if self.sink_state is None else (self.sink_state,)
        return tuple(sorted({*grouped, *(self.saliency_window or ()), *sinks}))

    @property
    def sink_state(self) -> int | None:
        """The layer whose input state shows sinks; None without sinks."""
        return None if self.sink_layer is None else self.sink_layer + 1

    @property
    def features_layer(self) -> int:
        """The layer whose input state counts as the encoder's output features."""
        return self.direction_layers[1] if self.output_layer is None else self.output_layer

    @classmethod
    def from_json(cls, text: str) -> "EncoderProfile":
        """Return the profile written in a JSON object, or raise a `ProfileError`."""
        try:
            fields: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise ProfileError(f"an encoder profile must be JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ProfileError(
                f"an encoder profile must be a JSON object, got {type(fields).__name__}"
            )
        known = {field.name: field for field in dataclasses.fields(cls)}
        if unknown := sorted(fields.keys() - known.keys()):
            raise ProfileError(f"unknown profile fields {unknown}; allowed are {list(known)}")
        required = {n for n, field in known.items() if field.default is dataclasses.MISSING}
        if missing := sorted(required - fields.keys()):
            raise ProfileError(f"missing profile fields {missing}; required are {sorted(required)}")
        return cls(**fields)

    def to_json(self) -> str:
        """Return the profile as a JSON object that `from_json` reads back unchanged."""
        fields = dataclasses.asdict(self)
        if self.provenance is None:
            del fields["provenance"]
        return json.dumps(fields, indent=2) + "\n"

    @classmethod
    def load(cls, path: str | Path) -> "EncoderProfile":
        """Read a profile from a JSON file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(f"cannot read the encoder profile {str(path)!r}: {error}") from error
        try:
            return cls.from_json(text)
        except ProfileError as error:
            raise ProfileError(f"{path}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the profile to a JSON file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")


# Layers, windows, coordinates and threshold are the paper's (appendix, sink detection and
# experimental settings). It names CLIP layers 11-12 and Qwen layers 15-17 as sink-dominated; we
# read the state after the last of them, which shows what emerged in all.
BUILT_IN_PROFILES: dict[str, EncoderProfile] = {
    "clip-vit-large-patch14-336": EncoderProfile(
        direction_layers=(2, 23),
        saliency_window=(14, 19),
        sink_layer=12,
        sink_coordinate=650,
    ),
    "qwen2.5-vl": EncoderProfile(
        direction_layers=(2, 31),
        saliency_window=(19, 24),
        sink_layer=17,
        sink_coordinate=849,
        output_layer=32,
    ),
}


def built_in_profile(name: str) -> EncoderProfile:
    """Return the built-in profile called `name`; an unknown name says how to provide one."""
    try:
        return BUILT_IN_PROFILES[name]
    except KeyError:
        raise ProfileError(
            f"no built-in profile for encoder {name!r}; built in are {sorted(BUILT_IN_PROFILES)}. "
            "For another encoder `msdg-vllm calibrate` measures one from images and writes it to a "
            "JSON file; load it with EncoderProfile.load(path)"
        ) from None

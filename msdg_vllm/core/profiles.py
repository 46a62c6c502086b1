"""Encoder profiles: which layers, window and sink coordinate the method reads of an encoder."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msdg_vllm.core.errors import ProfileError


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


@dataclass(frozen=True, slots=True)
class EncoderProfile:
    """The settings of the method for one vision encoder, fixed across images and budgets.

    A layer index names the state that enters that layer: layer `l` is Hugging Face
    `hidden_states[l]`.

    Attributes:
        direction_layers: The early and the late state of the update direction.
        saliency_window: The first and the last state of the saliency window.
        sink_layer: The layer with the highest max-to-median update ratio; sinks show in the
            state after it, `sink_layer + 1`.
        sink_coordinate: The coordinate of that state that tells sinks from other tokens.
        sink_threshold: A token is a sink when the absolute value there exceeds this.
        num_groups: K, the number of groups.
        seed: Decides the first centroid, the candidate number `seed mod M`.
        output_layer: The state handed to the projector, needed only to group by output
            features; None means the late direction layer.
    """

    direction_layers: tuple[int, int]
    saliency_window: tuple[int, int]
    sink_layer: int
    sink_coordinate: int
    sink_threshold: float = 50.0
    num_groups: int = 20
    seed: int = 0
    output_layer: int | None = None

    def __post_init__(self) -> None:
        for name in ("direction_layers", "saliency_window"):
            object.__setattr__(self, name, _ascending_pair(name, getattr(self, name)))
        for name in ("sink_layer", "sink_coordinate"):
            _require_int(name, getattr(self, name), minimum=0)
        _require_int("num_groups", self.num_groups, minimum=1)
        _require_int("seed", self.seed, minimum=None)
        if self.output_layer is not None:
            _require_int("output_layer", self.output_layer, minimum=0)
        threshold = self.sink_threshold
        is_number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
        if not is_number or not math.isfinite(threshold) or threshold < 0:
            raise ProfileError(f"sink_threshold must be a finite number >= 0, got {threshold!r}")
        object.__setattr__(self, "sink_threshold", float(threshold))

    @property
    def layers(self) -> tuple[int, ...]:
        """The sorted layers whose input states the method needs, `sink_layer + 1` among them."""
        return tuple(sorted({*self.direction_layers, *self.saliency_window, self.sink_layer + 1}))

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
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

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
            "For another encoder write its layers, window and sink coordinate to a JSON file and "
            "load it with EncoderProfile.load(path); EncoderProfile.save(path) writes an example"
        ) from None

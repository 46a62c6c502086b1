"""Operator settings: environment variables, because every vLLM process inherits them.

The server's launcher sets them from its options, one per setting and of the same name; offline
users set them before building `LLM`. vLLM's own `--mm-processor-kwargs` would hand unknown keys on
to the Hugging Face processor.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from msdg_vllm.core.errors import SettingsError
from msdg_vllm.methods import ON_DEMAND
from msdg_vllm.request import METHODS, QUERY_MODES, validate_choice, validate_retention

ALL_METHODS = "all"
"""What an operator says who lets requests use every method."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing an operator may set.

    Attributes:
        parse: Turns the text of the variable into the value; a `ValueError` says what is wrong.
        help: What it is for, as `--help` says it.
        metavar: What stands for the value there; empty for a switch.
        choices: The values there are, where they can be named.
        unset: What happens without it, in words, where the default does not say it.
    """

    parse: Callable[[str], Any]
    help: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    unset: str = ""


def variable_of(name: str) -> str:
    """Name of the environment variable of a setting."""
    return f"MSDG_{name.upper()}"


def _fraction(text: str) -> float:
    try:
        return validate_retention(float(text))
    except ValueError:
        raise ValueError(
            f"retention must be in (0, 1], got {text!r}; give 1.0 to turn pruning off"
        ) from None


def _count(what: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"must be {what}, got {text!r}")
        return int(text)

    return parse


def _number(what: str, is_allowed: Callable[[float], bool]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not is_allowed(value):
            raise ValueError(f"must be a number of {what}, got {text!r}")
        return value

    return parse


def _fractions(text: str) -> tuple[float, ...]:
    return tuple(_fraction(part.strip()) for part in text.split(","))


def _methods(text: str) -> tuple[str, ...]:
    if text == ALL_METHODS:
        return METHODS
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        validate_choice("a method", name, (*METHODS, ALL_METHODS))
    return names


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(f"must be 1 for on or 0 for off, got {text!r}")
    return text == "1"


def _one_of(name: str, allowed: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        validate_choice(name, text, allowed)
        return text

    return parse


def _setting(
    default: Any,
    parse: Callable[[str], Any],
    help: str,
    metavar: str = "",
    *,
    choices: tuple[str, ...] = (),
    unset: str = "",
) -> Any:
    setting = Setting(parse, help, metavar, choices, unset)
    return field(default=default, metadata={"setting": setting})


_tokens = _count("an integer of at least 1")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a request gets when it does not say otherwise, and what the server allows."""

    default_retention: float = _setting(
        1.0,
        _fraction,
        "Fraction of each image's tokens to keep, in (0, 1]; 1.0 turns pruning off.",
        "FRACTION",
    )
    default_method: str | None = _setting(
        None,
        _one_of("method", METHODS),
        "Which method selects the tokens; docs/methods.md compares them.",
        choices=METHODS,
        unset=f"{METHODS[0]}, or divprune for a vision encoder without a profile",
    )
    query_mode: str = _setting(
        QUERY_MODES[0],
        _one_of("query_mode", QUERY_MODES),
        "Which text the tokens are selected for: that of the image's own turn, that of the "
        "last turn, or none, so that all questions share one selection.",
        choices=QUERY_MODES,
    )
    profile: Path | None = _setting(  # noqa: RUF009
        None,
        Path,
        "Encoder profile (JSON), for a vision encoder that has none built in.",
        "FILE",
        unset="the model's own or a built-in one",
    )
    methods: tuple[str, ...] = _setting(
        tuple(name for name in METHODS if name not in ON_DEMAND),
        _methods,
        "Methods that requests may name, or `all`. Memory is set aside for the one that needs "
        "most of it.",
        "NAME,...",
        unset=f"all but {' and '.join(ON_DEMAND)}, which take much memory or wait for the device",
    )
    retention_aliases: tuple[float, ...] = _setting(
        (),
        _fractions,
        "Also serve the model as NAME@FRACTION for each of these, for clients that can send "
        "no field: such a name means that retention where a request says nothing else.",
        "FRACTION,...",
        unset="none",
    )
    detail_low_retention: float | None = _setting(
        None,
        _fraction,
        'What `"detail": "low"` of an image means, where neither the image nor the request '
        "names a retention.",
        "FRACTION",
        unset="nothing",
    )
    # What vLLM lets an image have that it fetches itself.
    max_request_mb: int = _setting(
        256,
        _count("a whole number of megabytes, at least 1"),
        "Largest body of a request, images included; a larger one is answered with a 413.",
        "MEGABYTES",
    )
    min_retention: float | None = _setting(
        None,
        _fraction,
        "Lowest retention that a request may ask for; asking for less is answered with a 400.",
        "FRACTION",
        unset="none",
    )
    max_visual_tokens: int | None = _setting(
        None,
        _tokens,
        "Most tokens that an image keeps whose request names no such number.",
        "TOKENS",
        unset="none",
    )
    max_visual_tokens_per_request: int | None = _setting(
        None,
        _tokens,
        "Most tokens that all images of a request may keep together; a request that would "
        "keep more is answered with a 400.",
        "TOKENS",
        unset="none",
    )
    target_ttft: float | None = _setting(
        None,
        _number("seconds above 0", lambda value: value > 0),
        "Time to first token to hold: requests that name no retention get the highest, up to "
        "the default and down to --min-retention (0.111 if there is none), that keeps it.",
        "SECONDS",
        unset="none",
    )
    image_store_gib: float = _setting(
        2.0,
        _number("gibibytes, at least 0", lambda value: value >= 0),
        "Host memory of each worker for images that the encoder has seen, so that the next "
        "question about one does not encode it again; 0 keeps none.",
        "GIBIBYTES",
    )
    explain: bool = _setting(
        True, _switch, "Let requests ask for explanations (`pruning.explain`)."
    )
    log_pruning: bool = _setting(
        False, _switch, "Log a line per pruned request: what was kept, and how long."
    )
    playground: bool = _setting(
        True, _switch, "Serve the page /playground, which shows what is kept of an image."
    )

    def retention_of_name(self, model: object) -> float | None:
        """What a served name such as `llava@0.111` stands for; None for a plain name."""
        _, _, suffix = str(model).rpartition("@")
        return next((one for one in self.retention_aliases if str(one) == suffix), None)

    @classmethod
    def table(cls) -> dict[str, Setting]:
        """Every setting by its name."""
        return {entry.name: entry.metadata["setting"] for entry in fields(cls)}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read and check the `MSDG_*` variables; an unset or empty one means its default."""
        values = {}
        for name, setting in cls.table().items():
            if text := environment.get(variable_of(name)):
                try:
                    values[name] = setting.parse(text)
                except ValueError as error:
                    raise SettingsError(f"{variable_of(name)}={text!r}: {error}") from None
        settings = cls(**values)
        floor, ceiling = settings.min_retention, settings.default_retention
        if floor is not None and floor > ceiling:
            raise SettingsError(
                f"{variable_of('min_retention')}={floor} is above "
                f"{variable_of('default_retention')}={ceiling}: nobody could get the default; "
                "lower the one or raise the other"
            )
        return settings

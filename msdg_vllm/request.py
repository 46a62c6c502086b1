"""What a request may ask of pruning: one value from where it enters to the processor.

Outside data is checked here, once, in the same words over HTTP and offline: a bare `retention`,
everything else under `pruning`.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from numbers import Real
from typing import Any

from msdg_vllm import methods
from msdg_vllm.core.budget import validate_retention
from msdg_vllm.core.errors import RequestError, RetentionError

QUERY_MODES = ("image-turn", "last-turn", "none")
METHODS = tuple(methods.METHODS)
SCOPES = ("tile", "image")

RETENTION, MAX_VISUAL_TOKENS, PRUNING = NAMES = ("retention", "max_visual_tokens", "pruning")
"""The keys that a request may carry; the first two also stand inside an image part."""

AUTO = "auto"
"""The retention of a request that leaves it to a server which holds a target."""

OPTIONS = ("query", "query_mode", "method", "scope", "explain")
"""Keys of the mapping under `pruning`."""

_MAX_SHOWN = 100

__all__ = ["METHODS", "QUERY_MODES", "SCOPES", "PruningRequest", "validate_retention"]


@dataclass(frozen=True, slots=True)
class ItemTurn:
    """The turn one image or video came in, and what the client said about the item itself."""

    text: str
    retention: float | str | None = None
    max_visual_tokens: int | None = None
    is_low_detail: bool = False


@dataclass(frozen=True, slots=True)
class Turns:
    """The texts a query can be taken from: each item's own turn, and the last user turn."""

    last: str = ""
    items: Mapping[str, Sequence[ItemTurn]] = field(default_factory=dict)

    def item(self, modality: str, index: int) -> ItemTurn:
        """The turn of an item; items the conversation did not name belong to the last turn."""
        turns = self.items.get(modality, ())
        return turns[index] if index < len(turns) else ItemTurn(self.last)

    def query(self, mode: str, modality: str, index: int) -> str:
        """The query text of an item in one of the query modes."""
        if mode == "none":
            return ""
        if mode == "last-turn":
            return self.last
        return self.item(modality, index).text or self.last


@dataclass(frozen=True, slots=True)
class PruningRequest:
    """One request's wishes; `None` means the server's default.

    Attributes:
        retention: Fraction of each image's tokens to keep, in (0, 1], or `AUTO`.
        query: Text that replaces the question found in the conversation.
        query_mode: Which text of the conversation is the query, one of `QUERY_MODES`.
        method: Which selector decides, one of `METHODS`.
        scope: Whether a tiled image spends its budget per tile or as a whole, one of `SCOPES`.
        explanation: Key under which the workers keep what was decided; 0 keeps nothing.
        turns: The conversation's turns, if it came as messages.
        max_visual_tokens: Most tokens to keep of each image; the smaller of the two budgets wins.
        alias_retention: What the served name that was asked stands for, where nothing else is said.
    """

    retention: float | str | None = None
    query: str | None = None
    query_mode: str | None = None
    method: str | None = None
    scope: str = SCOPES[0]
    explanation: int = 0
    turns: Turns | None = None
    max_visual_tokens: int | None = None
    alias_retention: float | None = None

    @classmethod
    def parse(
        cls, retention: object = None, pruning: object = None, max_visual_tokens: object = None
    ) -> PruningRequest:
        """Check what a client sent; an explained request gets a key nobody can guess."""
        wished = None if retention is None else check_retention(retention)
        most = None if max_visual_tokens is None else check_count(max_visual_tokens)
        if pruning is None:
            return cls(wished, max_visual_tokens=most)
        if not isinstance(pruning, Mapping):
            raise RequestError(
                f"pruning must be an object with keys among {', '.join(OPTIONS)}, "
                f"got {shown(pruning)}",
                parameter=PRUNING,
            )
        for key in pruning:
            if key not in OPTIONS:
                raise RequestError(
                    f"{key} stands beside `pruning`, not in it: send {key!r} on its own"
                    if key in (RETENTION, MAX_VISUAL_TOKENS)
                    else f"pruning.{key} is not a key of `pruning`; allowed are "
                    f"{', '.join(OPTIONS)}{_meant(key, OPTIONS)}",
                    parameter=f"pruning.{key}",
                )
        options = {key: value for key, value in pruning.items() if value is not None}
        for key, allowed in (("query_mode", QUERY_MODES), ("method", METHODS), ("scope", SCOPES)):
            if key in options:
                validate_choice(f"pruning.{key}", options[key], allowed)
        if not isinstance(options.get("query", ""), str):
            raise RequestError(
                f"pruning.query must be a string, got {shown(options['query'])}",
                parameter="pruning.query",
            )
        explain = options.pop("explain", False)
        if not isinstance(explain, bool):
            raise RequestError(
                f"pruning.explain must be true or false, got {shown(explain)}",
                parameter="pruning.explain",
            )
        explanation = 1 + secrets.randbelow(2**63 - 1) if explain else 0
        return cls(wished, explanation=explanation, max_visual_tokens=most, **options)

    @classmethod
    def take_from(cls, kwargs: dict[str, Any]) -> PruningRequest:
        """Take this plugin's keys out of `mm_processor_kwargs`; the rest stays for the model."""
        pruning = kwargs.pop(PRUNING, None)
        retention, most = kwargs.pop(RETENTION, None), kwargs.pop(MAX_VISUAL_TOKENS, None)
        if not isinstance(pruning, PruningRequest):
            return cls.parse(retention, pruning, most)
        if retention is not None and pruning.retention is None:
            pruning = replace(pruning, retention=check_retention(retention))
        if most is not None and pruning.max_visual_tokens is None:
            pruning = replace(pruning, max_visual_tokens=check_count(most))
        return pruning

    @property
    def is_default(self) -> bool:
        """Whether nothing was asked for; the turns of a chat are no wish."""
        return replace(self, turns=None) == PruningRequest()


def check_retention(value: object, parameter: str = RETENTION) -> float | str:
    """Return a retention in (0, 1] or `AUTO`, or raise the `RequestError` that names its place."""
    if value == AUTO:
        return AUTO
    try:
        return validate_retention(value)
    except RetentionError as error:
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        hint = "" if is_number else ". It must be a number, such as 0.222 without quotes"
        raise RequestError(f"{error}{hint}", parameter=parameter) from None


def check_count(value: object, parameter: str = MAX_VISUAL_TOKENS) -> int:
    """Return a number of tokens, or raise the `RequestError` that names its place."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(
            f"{MAX_VISUAL_TOKENS} must be an integer of at least 1, got {shown(value)}; leave it "
            "out for no limit",
            parameter=parameter,
        )
    return value


def validate_choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Raise `RequestError` unless `value` is one of the `allowed` words."""
    if not isinstance(value, str) or value not in allowed:
        words = ", ".join(repr(word) for word in allowed)
        raise RequestError(f"{name} must be one of {words}, got {shown(value)}", parameter=name)


def check_processor_kwargs(kwargs: Mapping[str, object]) -> None:
    """Raise `RequestError` for our names misspelt, or where they stood in an older version."""
    for key in kwargs:
        if key in OPTIONS:
            raise RequestError(
                f"{key} is a key of `pruning`: send mm_processor_kwargs="
                f'{{"pruning": {{"{key}": ...}}}}',
                parameter=key,
            )
    check_names(kwargs, "mm_processor_kwargs")


def check_names(keys: Collection[str], where: str, allowed: Collection[str] = NAMES) -> None:
    """Raise `RequestError` for a key that is nearly, but not quite, one of the `allowed`.

    Nobody reads such a key, so its sender would pay the full price without knowing.
    """
    for key in keys:
        if key not in allowed and (meant := _nearest(key, NAMES)) is not None:
            path = f"{where}.{key}" if where else str(key)
            advice = (
                f"did you mean `{meant}`?" if key != meant else f"`{key}` belongs to the request"
            )
            raise RequestError(f"{path} is not a field; {advice}", parameter=path)


def content_parts(turns: object, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Content parts of a conversation, or of a list of them, with the path to each."""
    for index, turn in enumerate(turns if isinstance(turns, list) else ()):
        where = f"{path}[{index}]"
        if isinstance(turn, list):
            yield from content_parts(turn, where)
        elif isinstance(turn, Mapping) and isinstance(turn.get("content"), list):
            for number, part in enumerate(turn["content"]):
                if isinstance(part, dict):
                    yield f"{where}.content[{number}]", part


def check_parts(turns: object, path: str) -> None:
    """Check what the images of a conversation say about pruning."""
    for where, part in content_parts(turns, path):
        for name, check in ((RETENTION, check_retention), (MAX_VISUAL_TOKENS, check_count)):
            if part.get(name) is not None:
                check(part[name], f"{where}.{name}")
        check_names(part, where, (RETENTION, MAX_VISUAL_TOKENS))
        for name, value in part.items():
            for inner in value if isinstance(value, dict) else ():
                if meant := _nearest(inner, (RETENTION, MAX_VISUAL_TOKENS)):
                    raise RequestError(
                        f"{where}.{name}.{inner} is not a field: put `{meant}` beside `{name}`, "
                        "not inside it",
                        parameter=f"{where}.{name}.{inner}",
                    )


def shown(value: object) -> str:
    """A value as an error message shows it: short, whatever a client sent."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _nearest(key: object, names: Collection[str]) -> str | None:
    word = str(key).lower()
    longer = (name for name in names if word.startswith(name))  # such as retention_rate
    # At 0.8 `attention` and `detection` are other words, `retentoin` and `prunning` are not.
    return next(longer, None) or next(iter(get_close_matches(word, names, 1, 0.8)), None)


def _meant(key: object, names: Collection[str]) -> str:
    nearest = _nearest(key, names)
    return "" if nearest is None else f"; did you mean {nearest}?"

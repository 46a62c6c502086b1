"""What a request may ask of pruning, checked in one place for HTTP and for offline use."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from msdg_vllm import methods
from msdg_vllm.core.budget import validate_retention
from msdg_vllm.core.errors import RequestError

QUERY_MODES = ("image-turn", "last-turn", "none")
METHODS = tuple(methods.METHODS)
SCOPES = ("tile", "image")

__all__ = ["METHODS", "QUERY_MODES", "SCOPES", "PruningRequest", "validate_retention"]


@dataclass(frozen=True, slots=True)
class PruningRequest:
    """One request's wishes; `None` means the server's default.

    Attributes:
        retention: Fraction of each image's tokens to keep, in (0, 1].
        query: Text that replaces the question found in the conversation.
        query_mode: Which text of the conversation is the query, one of `QUERY_MODES`.
        method: Which selector decides, one of `METHODS`.
        scope: Whether a tiled image spends its budget per tile or as a whole, one of `SCOPES`.
        explanation: Key under which the workers keep what was decided; 0 keeps nothing.
    """

    retention: float | None = None
    query: str | None = None
    query_mode: str | None = None
    method: str | None = None
    scope: str = "tile"
    explanation: int = 0

    def __post_init__(self) -> None:
        if self.retention is not None:
            validate_retention(self.retention)
        if self.query is not None and not isinstance(self.query, str):
            raise RequestError(f"query must be a string, got {self.query!r}", parameter="query")
        if self.query_mode is not None:
            validate_choice("query_mode", self.query_mode, QUERY_MODES)
        if self.method is not None:
            validate_choice("method", self.method, METHODS)
        validate_choice("scope", self.scope, SCOPES)

    @classmethod
    def pop_from(cls, kwargs: dict[str, Any]) -> PruningRequest:
        """Take this plugin's keys out of `mm_processor_kwargs`; the rest stays for the model."""
        own = {key: kwargs.pop(key) for key in tuple(kwargs) if key in cls.__slots__}
        return cls(**{key: value for key, value in own.items() if value is not None})

    @classmethod
    def keys_in(cls, kwargs: Mapping[str, object]) -> list[str]:
        """Names of this plugin's keys that `kwargs` holds."""
        return [key for key in kwargs if key in cls.__slots__]


def validate_choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Raise `RequestError` unless `value` is one of the `allowed` words."""
    if not isinstance(value, str) or value not in allowed:
        words = ", ".join(repr(word) for word in allowed)
        raise RequestError(f"{name} must be one of {words}, got {value!r}", parameter=name)

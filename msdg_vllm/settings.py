"""Operator settings: environment variables, because every vLLM process inherits them.

The server's launcher sets them from its options; offline users set them before building `LLM`.
vLLM's own `--mm-processor-kwargs` would hand unknown keys on to the Hugging Face processor.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from msdg_vllm.core.errors import SettingsError
from msdg_vllm.request import METHODS, QUERY_MODES, validate_choice, validate_retention

DEFAULT_RETENTION_VARIABLE = "MSDG_DEFAULT_RETENTION"
DEFAULT_METHOD_VARIABLE = "MSDG_DEFAULT_METHOD"
QUERY_MODE_VARIABLE = "MSDG_QUERY_MODE"
PROFILE_VARIABLE = "MSDG_PROFILE"
MAX_REQUEST_MB_VARIABLE = "MSDG_MAX_REQUEST_MB"


@dataclass(frozen=True, slots=True)
class Settings:
    """What a request gets when it does not say otherwise, and how large it may be."""

    default_retention: float = 1.0
    default_method: str = METHODS[0]
    query_mode: str = "image-turn"
    profile_path: Path | None = None
    max_request_mb: int = 256  # what vLLM lets a picture have that it fetches itself

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read and check the `MSDG_*` variables; an unset or empty one means its default."""
        defaults = cls()
        default_retention = defaults.default_retention
        if text := environment.get(DEFAULT_RETENTION_VARIABLE):
            try:
                default_retention = validate_retention(float(text))
            except ValueError as error:
                raise SettingsError(f"{DEFAULT_RETENTION_VARIABLE}={text!r}: {error}") from None
        default_method = environment.get(DEFAULT_METHOD_VARIABLE) or defaults.default_method
        query_mode = environment.get(QUERY_MODE_VARIABLE) or defaults.query_mode
        for variable, name, value, allowed in (
            (DEFAULT_METHOD_VARIABLE, "method", default_method, METHODS),
            (QUERY_MODE_VARIABLE, "query_mode", query_mode, QUERY_MODES),
        ):
            try:
                validate_choice(name, value, allowed)
            except ValueError as error:
                raise SettingsError(f"{variable}: {error}") from None
        profile_path = environment.get(PROFILE_VARIABLE)
        size = environment.get(MAX_REQUEST_MB_VARIABLE) or str(defaults.max_request_mb)
        if not size.isdecimal() or int(size) < 1:
            raise SettingsError(
                f"{MAX_REQUEST_MB_VARIABLE} must be a whole number of megabytes, at least 1, "
                f"got {size!r}"
            )
        return cls(
            default_retention=default_retention,
            default_method=default_method,
            query_mode=query_mode,
            profile_path=Path(profile_path) if profile_path else None,
            max_request_mb=int(size),
        )

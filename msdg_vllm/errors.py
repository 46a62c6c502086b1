"""The exceptions of `msdg_vllm.core.errors` under their public name."""

from msdg_vllm.core.errors import (
    MsdgError,
    OptionError,
    ProfileError,
    RequestError,
    RetentionError,
    SettingsError,
    ShapeError,
    UnsupportedVllmError,
)

__all__ = [
    "MsdgError",
    "OptionError",
    "ProfileError",
    "RequestError",
    "RetentionError",
    "SettingsError",
    "ShapeError",
    "UnsupportedVllmError",
]

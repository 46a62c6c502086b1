"""Encoder profiles under their public name."""

from msdg_vllm.core.profiles import BUILT_IN_PROFILES, EncoderProfile, built_in_profile

__all__ = ["BUILT_IN_PROFILES", "EncoderProfile", "built_in_profile"]

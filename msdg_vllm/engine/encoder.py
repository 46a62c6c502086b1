"""Which profile belongs to the vision encoder of a served model."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from vllm.config import ModelConfig
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from msdg_vllm.core.errors import ProfileError
from msdg_vllm.core.profiles import BUILT_IN_PROFILES, EncoderProfile
from msdg_vllm.settings import Settings, variable_of

PROFILE_FILE = "msdg_profile.json"

# Shapes of the encoders whose settings the paper gives: (model type, layers, width, patch).
_BUILT_IN_SHAPES = {
    ("clip_vision_model", 24, 1024, 14): "clip-vit-large-patch14-336",
    ("qwen2_5_vl_vision", 32, 1280, 14): "qwen2.5-vl",
    ("qwen2_5_vl", 32, 1280, 14): "qwen2.5-vl",
}


class NamedProfile(NamedTuple):
    """A profile and where it came from."""

    name: str
    profile: EncoderProfile


def profile_of(model_config: ModelConfig, settings: Settings) -> NamedProfile:
    """Find the profile: the operator's file, the model's own file, or a built-in one."""
    if settings.profile is not None:
        return NamedProfile(str(settings.profile), EncoderProfile.load(settings.profile))
    shape = _encoder_shape(model_config.hf_config.vision_config)
    built_in = _BUILT_IN_SHAPES.get(shape)
    own = get_hf_file_to_dict(PROFILE_FILE, model_config.model, model_config.revision)
    if own is not None:
        return NamedProfile(PROFILE_FILE, EncoderProfile.from_json(json.dumps(own)))
    if built_in is not None:
        return NamedProfile(built_in, BUILT_IN_PROFILES[built_in])
    model_type, layers, width, patch = shape
    raise ProfileError(
        f"no profile for the vision encoder of {model_config.model} ({model_type}, {layers} "
        f"layers, width {width}, patch {patch}); built in are {', '.join(BUILT_IN_PROFILES)}. "
        f"Put a {PROFILE_FILE} into the model folder or name one in {variable_of('profile')}; "
        "to serve this model without pruning, leave `msdg` out of VLLM_PLUGINS"
    )


def check_depth(name: str, profile: EncoderProfile, num_blocks: int) -> None:
    """Raise `ProfileError` when the profile reads a state that the loaded encoder never has."""
    if profile.layers[-1] > num_blocks:
        raise ProfileError(
            f"profile {name} reads the state that enters layer {profile.layers[-1]}, but the "
            f"loaded vision encoder has {num_blocks} layers; correct the profile's layers"
        )


def _encoder_shape(vision_config: Any) -> tuple[str, int, int, int]:
    return (
        vision_config.model_type,
        # Qwen's vision configs say `depth` for the number of layers.
        getattr(vision_config, "num_hidden_layers", None) or vision_config.depth,
        vision_config.hidden_size,
        vision_config.patch_size,
    )

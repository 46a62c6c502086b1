"""Which profile belongs to the vision encoder of a served model, and which methods it can feed."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.config import ModelConfig
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from msdg_vllm.core.errors import ProfileError, RequestError, SettingsError
from msdg_vllm.core.profiles import BUILT_IN_PROFILES, EncoderProfile
from msdg_vllm.methods import Encoder, method_named
from msdg_vllm.request import METHODS
from msdg_vllm.settings import Settings, variable_of

PROFILE_FILE = "msdg_profile.json"
METHOD_WITHOUT_PROFILE = "divprune"

# Shapes of the encoders whose settings the paper gives: (model type, layers, width, patch).
_BUILT_IN_SHAPES: dict[tuple[object, ...], str] = {
    ("clip_vision_model", 24, 1024, 14): "clip-vit-large-patch14-336",
    ("qwen2_5_vl_vision", 32, 1280, 14): "qwen2.5-vl",
    ("qwen2_5_vl", 32, 1280, 14): "qwen2.5-vl",
}


class NamedProfile(NamedTuple):
    """A profile and where it came from."""

    name: str
    profile: EncoderProfile


@dataclass(frozen=True, slots=True)
class Offer:
    """What a server offers on a model.

    Attributes:
        settings: What the operator set.
        profile: The profile of its encoder, and where it came from; None if there is none.
        encoder: What methods may know of the encoder.
        default_method: Which method selects unless a request names one.
        allowed: Which methods requests may name, as far as the model can feed them.
    """

    settings: Settings
    profile: NamedProfile | None
    encoder: Encoder
    default_method: str
    allowed: tuple[str, ...]

    @classmethod
    def of(
        cls,
        model_config: ModelConfig,
        encoder_of: Callable[[Any, EncoderProfile | None], Encoder],
    ) -> Offer:
        """Find out; raises what must stop a start: settings that do not fit the model."""
        settings = Settings.from_environment()
        profile = profile_of(model_config, settings)
        encoder = encoder_of(model_config.hf_config, profile and profile.profile)
        check_depth(profile, encoder.num_layers)
        default = default_method(settings, profile)
        offer = cls(settings, profile, encoder, default, allowed_methods(settings, default))
        try:
            offer.check_method(default)
        except RequestError as error:
            raise SettingsError(f"{variable_of('default_method')}: {error}") from None
        return offer

    @property
    def unmet_needs(self) -> dict[str, str]:
        """What methods read that this model does not give, by their name."""
        needs = {name: method_named(name).unmet_need(self.encoder) for name in METHODS}
        return {name: missing for name, missing in needs.items() if missing is not None}

    @property
    def methods(self) -> list[str]:
        """Names of the methods that requests may use on this model."""
        unmet = self.unmet_needs
        return [name for name in self.allowed if name not in unmet]

    def check_method(self, name: str) -> None:
        """Raise `RequestError` for a method that is not allowed or cannot prune this model."""
        if name not in self.allowed:
            raise RequestError(
                f"method {name!r} is not among those that this server allows (--methods): "
                f"{', '.join(map(repr, self.methods))}",
                parameter="pruning.method",
            )
        if (missing := method_named(name).unmet_need(self.encoder)) is not None:
            raise RequestError(
                f"method {name!r} cannot prune this model: it reads {missing}; "
                f"methods that can are {', '.join(map(repr, self.methods))}",
                parameter="pruning.method",
            )


def profile_of(model_config: ModelConfig, settings: Settings) -> NamedProfile | None:
    """Find the profile: the operator's file, the model's own file, or a built-in one, or none."""
    if settings.profile is not None:
        return NamedProfile(str(settings.profile), EncoderProfile.load(settings.profile))
    own = get_hf_file_to_dict(PROFILE_FILE, model_config.model, model_config.revision)
    if own is not None:
        return NamedProfile(PROFILE_FILE, EncoderProfile.from_json(json.dumps(own)))
    built_in = _BUILT_IN_SHAPES.get(_encoder_shape(model_config.hf_config.vision_config))
    if built_in is not None:
        return NamedProfile(built_in, BUILT_IN_PROFILES[built_in])
    return None


def default_method(settings: Settings, profile: NamedProfile | None) -> str:
    """Which method selects unless a request names one.

    Nobody guesses layers: without a profile it is a method that reads no states.
    """
    if settings.default_method is not None:
        return settings.default_method
    usual = METHOD_WITHOUT_PROFILE if profile is None else METHODS[0]
    return usual if usual in settings.methods else settings.methods[0]


def allowed_methods(settings: Settings, default: str) -> tuple[str, ...]:
    """Which methods requests may name: the default one, and those that the operator lets them."""
    return tuple(name for name in METHODS if name == default or name in settings.methods)


def profiled_method(names: Collection[str], encoder: Encoder) -> str:
    """The method on which memory is profiled: of those, the one that holds most of the encoder."""
    fitting = [name for name in names if method_named(name).unmet_need(encoder) is None]
    return max(fitting, key=lambda name: method_named(name).needs(encoder).num_held_states)


def check_depth(found: NamedProfile | None, num_blocks: int) -> None:
    """Raise `ProfileError` when the profile reads a state that the loaded encoder never has."""
    if found is not None and (last := found.profile.layers[-1]) > num_blocks:
        raise ProfileError(
            f"profile {found.name} reads the state that enters layer {last}, but the "
            f"loaded vision encoder has {num_blocks} layers; correct the profile's layers"
        )


def _encoder_shape(vision_config: Any) -> tuple[object, ...]:
    patch = vision_config.patch_size
    return (
        vision_config.model_type,
        # Qwen's vision configs say `depth` for the number of layers.
        getattr(vision_config, "num_hidden_layers", None) or getattr(vision_config, "depth", None),
        vision_config.hidden_size,
        patch if isinstance(patch, int) else patch[0],
    )

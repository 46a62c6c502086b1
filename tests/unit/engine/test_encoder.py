"""Which profile belongs to a vision encoder, and what decides without one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from msdg_vllm.core.errors import ProfileError
from msdg_vllm.core.profiles import built_in_profile
from msdg_vllm.engine.encoder import (
    PROFILE_FILE,
    NamedProfile,
    allowed_methods,
    check_depth,
    default_method,
    profile_of,
    profiled_method,
)
from msdg_vllm.methods import METHODS, ON_DEMAND, Encoder, method_named
from msdg_vllm.settings import Settings
from tests.unit.methods.test_contract import WAITING

CLIP = {"model_type": "clip_vision_model", "num_hidden_layers": 24, "hidden_size": 1024}
QWEN3 = {"model_type": "qwen3_vl_vision", "depth": 27, "hidden_size": 1152}
INTERN = {"model_type": "internvl_vision", "num_hidden_layers": 24, "hidden_size": 1024}


def model_config(folder: Path, patch_size: Any = 14, **vision: Any) -> Any:
    vision_config = SimpleNamespace(**vision, patch_size=patch_size)
    return SimpleNamespace(
        model=str(folder), revision=None, hf_config=SimpleNamespace(vision_config=vision_config)
    )


def test_an_encoder_of_the_paper_has_a_built_in_profile(tmp_path: Path) -> None:
    found = profile_of(model_config(tmp_path, **CLIP), Settings())
    assert found is not None
    assert found.name == "clip-vit-large-patch14-336"
    assert default_method(Settings(), found) == "msdg"


@pytest.mark.parametrize("vision", [QWEN3, INTERN], ids=lambda vision: vision["model_type"])
def test_nobody_guesses_a_profile_for_another_encoder(
    tmp_path: Path, vision: dict[str, Any]
) -> None:
    assert profile_of(model_config(tmp_path, [14, 14], **vision), Settings()) is None
    assert default_method(Settings(), None) == "divprune"
    assert default_method(Settings(default_method="random"), None) == "random"


def test_a_file_beside_the_weights_makes_msdg_the_default_again(tmp_path: Path) -> None:
    values = {
        "direction_layers": [2, 26],
        "saliency_window": [16, 21],
        "sink_layer": 13,
        "sink_coordinate": 5,
    }
    (tmp_path / PROFILE_FILE).write_text(json.dumps(values))
    found = profile_of(model_config(tmp_path, **QWEN3), Settings())
    assert found is not None
    assert default_method(Settings(), found) == "msdg"
    check_depth(found, 27)
    with pytest.raises(ProfileError, match=r"enters layer 26, but .* has 25 layers"):
        check_depth(found, 25)


def test_methods_that_read_a_profile_are_refused_without_one_and_the_others_are_not() -> None:
    encoder = Encoder(num_layers=24, profile=None)
    refused = {name for name in METHODS if method_named(name).unmet_need(encoder) is not None}
    assert refused == {"msdg", "evocut", "representation_shift", "resize", "resize+msdg"}
    assert "msdg-vllm calibrate" in str(method_named("msdg").unmet_need(encoder))


def test_a_method_that_merges_is_refused_where_tokens_carry_more_than_an_embedding() -> None:
    encoder = Encoder(num_layers=24, profile=None, has_class_token=False, num_levels=3)
    assert "carry 3 more" in str(method_named("visionzip").unmet_need(encoder))
    assert method_named("divprune").unmet_need(encoder) is None


def test_memory_is_profiled_on_the_hungriest_method_that_requests_may_name() -> None:
    profile = built_in_profile("clip-vit-large-patch14-336")
    encoder = Encoder(num_layers=23, profile=profile)
    assert profiled_method(allowed_methods(Settings(), "msdg"), encoder) == "msdg"
    assert profiled_method(METHODS, encoder) == "evocut"
    assert profiled_method(("random", "divprune"), encoder) in {"random", "divprune"}
    assert profiled_method(METHODS, Encoder(23, None)) not in {"msdg", "evocut"}
    heaviest = method_named("msdg").needs(encoder).num_held_states
    for name in Settings().methods:
        assert method_named(name).needs(encoder).num_held_states <= heaviest, name
    assert set(ON_DEMAND) >= WAITING


def test_the_default_method_is_always_allowed() -> None:
    named = Settings(methods=("random", "cdpruner"))
    found = NamedProfile("some", built_in_profile("qwen2.5-vl"))
    assert default_method(named, found) == "random"
    chosen = Settings(methods=("random",), default_method="evocut")
    assert allowed_methods(chosen, default_method(chosen, found)) == ("random", "evocut")

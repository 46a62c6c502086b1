"""Encoder profiles: the built-in ones, JSON, validation."""

import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from msdg_vllm.core import SelectionOptions
from msdg_vllm.core.errors import MsdgError, ProfileError
from msdg_vllm.core.profiles import BUILT_IN_PROFILES, EncoderProfile, built_in_profile

CLIP = built_in_profile("clip-vit-large-patch14-336")
QWEN = built_in_profile("qwen2.5-vl")


def test_the_built_in_profiles_are_those_of_the_paper() -> None:
    assert (
        EncoderProfile(
            direction_layers=(2, 23),
            saliency_window=(14, 19),
            sink_layer=12,
            sink_coordinate=650,
            sink_threshold=50.0,
            num_groups=20,
            seed=0,
        )
        == CLIP
    )
    assert replace(QWEN, output_layer=None) == EncoderProfile(
        direction_layers=(2, 31),
        saliency_window=(19, 24),
        sink_layer=17,
        sink_coordinate=849,
        sink_threshold=50.0,
        num_groups=20,
        seed=0,
    )


def test_the_layers_are_sorted_and_hold_the_state_behind_the_sink_layer() -> None:
    assert CLIP.layers == (2, 13, 14, 19, 23)
    assert QWEN.layers == (2, 18, 19, 24, 31)


def test_layers_that_serve_twice_are_named_once() -> None:
    profile = EncoderProfile((2, 19), (13, 19), sink_layer=12, sink_coordinate=0)
    assert profile.layers == (2, 13, 19)


def test_options_name_the_layers_they_need() -> None:
    assert SelectionOptions().layers(CLIP) == CLIP.layers
    assert SelectionOptions(saliency="accumulated").layers(CLIP) == (2, *range(13, 20), 23)
    assert SelectionOptions(grouping="output").layers(CLIP) == (13, 14, 19, 23)
    assert SelectionOptions(grouping="output").layers(QWEN) == (18, 19, 24, 32)
    assert SelectionOptions(sink_filter=False).layers(CLIP) == (2, 14, 19, 23)
    assert SelectionOptions(grouping="none", saliency="given").layers(CLIP) == (13,)


def test_a_profile_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        CLIP.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", BUILT_IN_PROFILES)
def test_a_profile_survives_a_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    built_in_profile(name).save(path)
    assert EncoderProfile.load(path) == built_in_profile(name)
    assert EncoderProfile.load(str(path)) == built_in_profile(name)


def test_json_may_leave_out_what_has_a_default() -> None:
    text = '{"direction_layers": [2, 23], "saliency_window": [14, 19], "sink_layer": 12, '
    assert EncoderProfile.from_json(text + '"sink_coordinate": 650}') == CLIP


def test_a_profile_from_before_calibration_means_the_paper() -> None:
    before = ["direction_layers", "saliency_window", "sink_layer", "sink_coordinate"]
    before += ["sink_threshold", "num_groups", "seed", "output_layer"]
    fields = json.loads(QWEN.to_json())
    loaded = EncoderProfile.from_json(json.dumps({name: fields[name] for name in before}))
    assert loaded == QWEN
    assert (loaded.saliency_scale, loaded.grouping, loaded.provenance) == (1.0, "direction", None)


def test_a_profile_without_sinks_and_window_reads_only_what_it_groups_by() -> None:
    bare = EncoderProfile((2, 23), None, sink_layer=None, sink_coordinate=None)
    assert bare.layers == (2, 23)
    assert SelectionOptions().layers(bare) == (2, 23)
    assert replace(bare, grouping="output", output_layer=24).layers == (24,)
    assert SelectionOptions(grouping="none").layers(bare) == (23,)
    assert EncoderProfile.from_json(bare.to_json()) == bare


def test_provenance_is_kept_and_changes_nothing() -> None:
    told = replace(CLIP, provenance={"model": "a/b", "images": 200, "verdicts": {"sinks": "found"}})
    assert EncoderProfile.from_json(told.to_json()).provenance == told.provenance
    assert told == CLIP
    assert hash(told) == hash(CLIP)
    assert "provenance" not in json.loads(CLIP.to_json())


def test_an_unknown_encoder_says_how_to_provide_a_profile() -> None:
    with pytest.raises(ProfileError) as caught:
        built_in_profile("siglip")
    message = str(caught.value)
    assert "'siglip'" in message
    assert "clip-vit-large-patch14-336" in message
    assert "EncoderProfile.load(path)" in message
    assert "msdg-vllm calibrate" in message
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, MsdgError)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("direction_layers", [2], "direction_layers must be a pair of layers, got [2]"),
        ("direction_layers", 2, "direction_layers must be a pair of layers, got 2"),
        ("direction_layers", [2, "x"], "direction_layers[1] must be an integer, got 'x'"),
        ("direction_layers", [-1, 3], "direction_layers[0] must be at least 0, got -1"),
        ("direction_layers", [23, 2], "direction_layers must go from an earlier to a later layer"),
        ("saliency_window", [14, 14], "saliency_window must go from an earlier to a later layer"),
        ("sink_layer", -1, "sink_layer must be at least 0, got -1"),
        ("sink_coordinate", 1.5, "sink_coordinate must be an integer, got 1.5"),
        ("sink_threshold", -1, "sink_threshold must be a finite number >= 0, got -1"),
        ("sink_threshold", float("nan"), "sink_threshold must be a finite number >= 0, got nan"),
        ("sink_threshold", "50", "sink_threshold must be a finite number >= 0, got '50'"),
        ("num_groups", 0, "num_groups must be at least 1, got 0"),
        ("num_groups", True, "num_groups must be an integer, got True"),
        ("seed", None, "seed must be an integer, got None"),
        ("output_layer", -2, "output_layer must be at least 0, got -2"),
        ("sink_layer", None, "sink_layer and sink_coordinate must both be given or both be null"),
        ("saliency_scale", 0, "saliency_scale must be a finite number > 0, got 0"),
        ("saliency_scale", "1", "saliency_scale must be a finite number > 0, got '1'"),
        ("grouping", "none", "grouping must be one of ['direction', 'output'], got 'none'"),
        ("provenance", [1], "provenance must be a JSON object, got [1]"),
    ],
)
def test_a_profile_that_does_not_add_up_is_refused(field: str, value: object, message: str) -> None:
    fields = {**json.loads(CLIP.to_json()), field: value}
    with pytest.raises(ProfileError) as caught:
        EncoderProfile.from_json(json.dumps(fields))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "an encoder profile must be JSON"),
        ("[1]", "an encoder profile must be a JSON object, got list"),
        ('{"sink_layer": 12}', "missing profile fields"),
        (CLIP.to_json().replace("seed", "sed"), "unknown profile fields ['sed']"),
    ],
)
def test_a_file_that_is_no_profile_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ProfileError) as caught:
        EncoderProfile.load(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot read the encoder profile"):
        EncoderProfile.load(tmp_path / "nowhere.json")

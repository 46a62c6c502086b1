"""Operator settings come from the environment, checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from msdg_vllm.core.errors import SettingsError
from msdg_vllm.methods import ON_DEMAND
from msdg_vllm.request import METHODS
from msdg_vllm.settings import Settings


def test_nothing_set_means_no_pruning() -> None:
    assert Settings.from_environment({}) == Settings(1.0, None, "image-turn", None)
    assert Settings.from_environment({"MSDG_DEFAULT_RETENTION": ""}) == Settings()


def test_every_variable_is_read() -> None:
    environment = {
        "MSDG_DEFAULT_RETENTION": "0.222",
        "MSDG_DEFAULT_METHOD": "random",
        "MSDG_QUERY_MODE": "none",
        "MSDG_PROFILE": "encoder.json",
        "MSDG_METHODS": "random, evocut,random",
        "MSDG_RETENTION_ALIASES": "0.333, 0.111",
        "MSDG_DETAIL_LOW_RETENTION": "0.056",
        "MSDG_MAX_REQUEST_MB": "64",
        "MSDG_MIN_RETENTION": "0.111",
        "MSDG_MAX_VISUAL_TOKENS": "512",
        "MSDG_MAX_VISUAL_TOKENS_PER_REQUEST": "4096",
        "MSDG_TARGET_TTFT": "1.5",
        "MSDG_EXPLAIN": "0",
        "MSDG_LOG_PRUNING": "1",
        "MSDG_PLAYGROUND": "0",
    }
    assert Settings.from_environment(environment) == Settings(
        default_retention=0.222,
        default_method="random",
        query_mode="none",
        profile=Path("encoder.json"),
        methods=("random", "evocut"),
        retention_aliases=(0.333, 0.111),
        detail_low_retention=0.056,
        max_request_mb=64,
        min_retention=0.111,
        max_visual_tokens=512,
        max_visual_tokens_per_request=4096,
        target_ttft=1.5,
        explain=False,
        log_pruning=True,
        playground=False,
    )


@pytest.mark.parametrize("text", ["0", "1.5", "nan", "half"])
def test_bad_default_retention_names_the_variable(text: str) -> None:
    with pytest.raises(SettingsError, match="MSDG_DEFAULT_RETENTION"):
        Settings.from_environment({"MSDG_DEFAULT_RETENTION": text})


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "64MB"])
def test_a_bad_request_size_names_the_variable(text: str) -> None:
    with pytest.raises(SettingsError, match=f"MSDG_MAX_REQUEST_MB=.*at least 1, got '{text}'"):
        Settings.from_environment({"MSDG_MAX_REQUEST_MB": text})


def test_bad_query_mode_names_the_allowed_ones() -> None:
    with pytest.raises(SettingsError, match=r"MSDG_QUERY_MODE.*'image-turn', 'last-turn', 'none'"):
        Settings.from_environment({"MSDG_QUERY_MODE": "first-turn"})


def test_bad_default_method_names_the_allowed_ones() -> None:
    with pytest.raises(SettingsError, match=r"MSDG_DEFAULT_METHOD.*'msdg', 'random'.*got 'fastv'"):
        Settings.from_environment({"MSDG_DEFAULT_METHOD": "fastv"})


def test_a_switch_is_one_or_nought() -> None:
    with pytest.raises(SettingsError, match="MSDG_PLAYGROUND='off': must be 1 for on"):
        Settings.from_environment({"MSDG_PLAYGROUND": "off"})


def test_every_setting_has_a_sentence_for_help() -> None:
    assert all(setting.help.endswith(".") for setting in Settings.table().values())


def test_a_floor_above_the_default_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"MSDG_MIN_RETENTION=0\.5 is above .*=0\.222"):
        Settings.from_environment({"MSDG_MIN_RETENTION": "0.5", "MSDG_DEFAULT_RETENTION": "0.222"})


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_a_target_is_a_time(text: str) -> None:
    with pytest.raises(SettingsError, match=r"MSDG_TARGET_TTFT=.*number of seconds above 0"):
        Settings.from_environment({"MSDG_TARGET_TTFT": text})


def test_a_bad_alias_names_the_variable() -> None:
    with pytest.raises(SettingsError, match=r"MSDG_RETENTION_ALIASES=.*got '2'"):
        Settings.from_environment({"MSDG_RETENTION_ALIASES": "0.5,2"})


def test_a_served_name_stands_for_its_retention() -> None:
    settings = Settings(retention_aliases=(0.333, 0.5))
    assert settings.retention_of_name("org/llava@0.333") == 0.333
    assert settings.retention_of_name("a@b@0.5") == 0.5
    for name in ("org/llava", "llava@0.111", "llava@", "0.333x", None):
        assert settings.retention_of_name(name) is None


def test_methods_that_wait_or_hold_much_memory_must_be_named() -> None:
    assert set(METHODS) - set(Settings().methods) == set(ON_DEMAND)
    assert Settings.from_environment({"MSDG_METHODS": "all"}).methods == METHODS
    with pytest.raises(SettingsError, match=r"MSDG_METHODS='random,fastv': .* got 'fastv'"):
        Settings.from_environment({"MSDG_METHODS": "random,fastv"})

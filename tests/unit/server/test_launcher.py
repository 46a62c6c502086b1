"""What the launcher makes of its options, and which plugins it leaves switched on."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from msdg_vllm.settings import Settings
from server import launcher
from server.launcher import (
    DEFAULT_MAX_IMAGES,
    apply_options,
    check_architecture,
    check_frontend,
    enable_plugin,
    make_parser,
)
from server.shutdown import DEFAULT_TIMEOUT

POINTS = {
    "vllm.general_plugins": ["msdg", "bart"],
    "vllm.stat_logger_plugins": ["logger"],
    "vllm.endpoint_plugins": ["msdg", "other-routes"],
}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(group: str) -> list[EntryPoint]:
        return [EntryPoint(name, "module:thing", group) for name in POINTS.get(group, ())]

    monkeypatch.setattr(launcher, "entry_points", entry_points)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "msdg,bart,logger"),
        ({"VLLM_PLUGINS": ""}, "msdg"),
        ({"VLLM_PLUGINS": "bart"}, "bart,msdg"),
        ({"VLLM_PLUGINS": "msdg,other-routes"}, "msdg,other-routes"),
    ],
)
def test_other_plugins_stay_as_they_were(before: dict[str, str], after: str) -> None:
    environment = dict(before)
    enable_plugin(environment)
    assert environment["VLLM_PLUGINS"] == after


def test_a_missing_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = lambda group: []  # noqa: E731
    monkeypatch.setattr(launcher, "entry_points", nothing)
    with pytest.raises(ValueError, match="pip install"):
        enable_plugin({})


@pytest.fixture(scope="module")
def parser() -> Any:
    return make_parser()


def test_options_become_the_environment_of_all_processes(parser: Any) -> None:
    options = parser.parse_args(
        [
            "--default-retention",
            "0.25",
            "--default-method",
            "random",
            "--query-mode",
            "none",
            "--max-request-mb",
            "64",
            "--no-playground",
        ]
    )
    environment: dict[str, str] = {}
    apply_options(options, environment)
    assert environment == {
        "MSDG_DEFAULT_RETENTION": "0.25",
        "MSDG_DEFAULT_METHOD": "random",
        "MSDG_QUERY_MODE": "none",
        "MSDG_MAX_REQUEST_MB": "64",
        "MSDG_PLAYGROUND": "0",
    }
    # vLLM hands all options on to its own processes; it must not meet ours.
    assert not Settings.table().keys() & vars(options).keys()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--default-retention", "0"], "retention must be in (0, 1], got '0'"),
        (["--default-retention", "nan"], "retention must be in (0, 1], got 'nan'"),
        (["--default-retention", "much"], "retention must be in (0, 1], got 'much'"),
        (["--default-method", "fastv"], "invalid choice: 'fastv'"),
        (["--query-mode", "first-turn"], "invalid choice: 'first-turn'"),
    ],
)
def test_wrong_options_are_refused(
    parser: Any, capsys: pytest.CaptureFixture[str], options: list[str], complaint: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(options)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_options_with_several_values_reach_the_other_processes(parser: Any) -> None:
    environment: dict[str, str] = {}
    options = ["--retention-aliases", "0.333, 0.111", "--methods", "msdg,divprune"]
    apply_options(parser.parse_args(options), environment)
    settings = Settings.from_environment(environment)
    assert settings.retention_aliases == (0.333, 0.111)
    assert settings.methods == ("msdg", "divprune")


def test_wrong_variables_are_refused(parser: Any) -> None:
    with pytest.raises(ValueError, match="MSDG_DEFAULT_RETENTION='2'"):
        apply_options(parser.parse_args([]), {"MSDG_DEFAULT_RETENTION": "2"})


def test_a_missing_profile_is_refused(parser: Any) -> None:
    with pytest.raises(ValueError, match=r"missing\.json"):
        apply_options(parser.parse_args(["--profile", "missing.json"]), {})


@pytest.mark.parametrize(
    "overrides", [[], ["--hf-overrides", '{"architectures": ["MistralForCausalLM"]}']]
)
def test_a_model_that_cannot_be_pruned_is_refused(
    parser: Any, tmp_path: Path, overrides: list[str]
) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = parser.parse_args(["--model", str(tmp_path), *overrides])
    with pytest.raises(ValueError, match=r"ForCausalLM, which cannot be pruned.*LlavaFor"):
        check_architecture(options)


def test_front_ends_without_plugins_are_refused(
    parser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_frontend(Namespace(grpc=False))
    with pytest.raises(ValueError, match="--grpc"):
        check_frontend(parser.parse_args(["--grpc"]))
    monkeypatch.setitem(os.environ, "VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(ValueError, match="VLLM_USE_RUST_FRONTEND"):
        check_frontend(Namespace(grpc=False))


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        ([], {"image": DEFAULT_MAX_IMAGES}),
        (['--limit-mm-per-prompt={"video": 1}'], {"image": DEFAULT_MAX_IMAGES, "video": 1}),
        (['--limit-mm-per-prompt={"image": 400}'], {"image": 400}),
    ],
)
def test_images_are_limited_unless_the_operator_says_otherwise(
    parser: Any, given: list[str], limits: dict[str, int]
) -> None:
    options = parser.parse_args(["--model", "m", *given])
    apply_options(options, {})
    assert options.limit_mm_per_prompt == limits


def test_a_stop_waits_for_requests_unless_the_operator_says_otherwise(parser: Any) -> None:
    assert parser.parse_args(["--model", "m"]).shutdown_timeout == DEFAULT_TIMEOUT
    assert parser.parse_args(["--model", "m", "--shutdown-timeout=0"]).shutdown_timeout == 0

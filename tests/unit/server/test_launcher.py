"""Which plugins the launcher leaves switched on."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from server import launcher
from server.launcher import enable_plugin

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

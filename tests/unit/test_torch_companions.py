"""torch's companions can be imported in every process, whichever builds of them are installed."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from msdg_vllm import torch_companions

ROOT = Path(__file__).parents[2]
START_UP_FILE = ROOT / "scripts" / "msdg-vllm-torch-companions.pth"
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

UNINSTALL = """
import sys
from msdg_vllm.torch_companions import _CompanionFinder
sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _CompanionFinder)]
"""

IMPORT_EACH = f"""
import importlib, json
from msdg_vllm import torch_companions
ends = {{}}
for name in {COMPANIONS}:
    try:
        importlib.import_module(name)
        ends[name] = "imported"
    except Exception as error:
        ends[name] = f"{{type(error).__name__}}: {{error}}"
ends["declared"] = torch_companions._library is not None
print(json.dumps(ends))
"""

# Declares what a working build of torchvision brings, as far as its import looks at it.
PRETEND_A_WORKING_TORCHVISION = """
import torch
library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def run(code: str, *options: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, cwd=cwd, check=False
    )


@pytest.fixture(scope="module")
def stock_ends() -> dict[str, str]:
    """How each companion's import ends without our help."""
    return json.loads(run(UNINSTALL + IMPORT_EACH).stdout)


@pytest.fixture(scope="module")
def ends() -> dict[str, str]:
    """How each companion's import ends in an interpreter of this environment."""
    return json.loads(run(IMPORT_EACH).stdout)


def test_vllm_and_the_processors_of_transformers_can_be_imported(tmp_path: Path) -> None:
    child = run("import vllm, vllm.multimodal.media, transformers.processing_utils", cwd=tmp_path)
    assert child.returncode == 0, child.stderr


@pytest.mark.parametrize("name", ["torchvision", "torchaudio"])
def test_what_is_imported_without_asking_can_be_imported(ends: dict[str, str], name: str) -> None:
    assert ends[name] == "imported"


def test_torchcodec_ends_in_a_way_that_vllm_is_prepared_for(ends: dict[str, str]) -> None:
    # RuntimeError is torchcodec's own answer where there is no ffmpeg.
    assert ends["torchcodec"].startswith(("imported", "ImportError: ", "RuntimeError: "))


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("torchvision", "RuntimeError: operator torchvision::nms does not exist"),
        ("torchaudio", "OSError: Could not load this library"),
        ("torchcodec", "OSError: Could not load this library"),
    ],
)
def test_without_the_start_up_file_a_cuda_build_beside_a_cpu_torch_fails(
    stock_ends: dict[str, str], name: str, failure: str
) -> None:
    if stock_ends[name].startswith(("imported", "ModuleNotFoundError")):
        pytest.skip(f"the installed {name} needs no help")
    assert stock_ends[name].startswith(failure)


def test_operators_are_declared_only_where_torchvision_fails_without(
    ends: dict[str, Any], stock_ends: dict[str, str]
) -> None:
    assert ends["declared"] == (stock_ends["torchvision"] != "imported")


def test_nothing_is_declared_next_to_a_working_torchvision() -> None:
    child = run(PRETEND_A_WORKING_TORCHVISION + IMPORT_EACH)
    ends = json.loads(child.stdout)
    assert (ends["torchvision"], ends["declared"]) == ("imported", False)


def test_a_working_torchaudio_loads_its_library() -> None:
    module = ModuleType("utils")
    torch_companions._execute_torchaudio(
        lambda module: setattr(module, "_load_lib", lambda name: name == "present"), module
    )
    assert module._load_lib("present") is True
    assert module._load_lib("absent") is False


def test_another_failure_of_torchaudio_is_not_hidden() -> None:
    def load_library(name: str) -> bool:
        raise ValueError(name)

    module = ModuleType("utils")
    torch_companions._execute_torchaudio(
        lambda module: setattr(module, "_load_lib", load_library), module
    )
    with pytest.raises(ValueError, match="libtorchaudio"):
        module._load_lib("libtorchaudio")


def test_the_hook_is_installed_once_and_imports_neither_torch_nor_vllm() -> None:
    child = run(
        "import sys\n"
        "from msdg_vllm.torch_companions import _CompanionFinder, install\n"
        "install()\n"
        "assert sum(isinstance(finder, _CompanionFinder) for finder in sys.meta_path) == 1\n"
        "assert not {'torch', 'vllm'} & set(sys.modules)"
    )
    assert child.returncode == 0, child.stderr


def test_the_start_up_file_alone_installs_the_hook() -> None:
    child = run("import sys; print([type(finder).__name__ for finder in sys.meta_path])")
    assert "_CompanionFinder" in child.stdout


def test_the_hook_loads_no_module_beyond_its_own() -> None:
    child = run(
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "before = set(sys.modules)\n"
        "import msdg_vllm.torch_companions\n"
        "print(*sorted(set(sys.modules) - before))",
        "-S",  # other packages' start-up files would load modules of their own
    )
    assert child.stdout.split() == ["__future__", "msdg_vllm", "msdg_vllm.torch_companions"]


def test_a_left_over_start_up_file_is_silent(tmp_path: Path) -> None:
    child = run(f"exec(open({str(START_UP_FILE)!r}).read())", "-I", "-S", cwd=tmp_path)
    assert (child.returncode, child.stderr) == (0, "")


def test_where_the_wheel_was_installed_the_module_writes_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    written = Path(torch_companions.write_start_up_file())
    assert written == tmp_path / START_UP_FILE.name
    assert written.read_text() == START_UP_FILE.read_text()

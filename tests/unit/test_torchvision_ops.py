"""torchvision can be imported in every process, whichever build of it is installed."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
START_UP_FILE = ROOT / "scripts" / "msdg-vllm-torchvision.pth"

UNINSTALL = """
import sys
from msdg_vllm.torchvision_ops import _OperatorFinder
sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _OperatorFinder)]
"""

# Declares what a working build of torchvision brings, as far as its import looks at it.
PRETEND_A_WORKING_BUILD = """
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
def has_operators() -> bool:
    """Whether the installed torchvision can load its compiled operators."""
    child = run("from torchvision.extension import _has_ops; print(_has_ops())")
    return child.stdout.strip() == "True"


def test_vllm_and_torchvision_can_be_imported_in_a_child_process(tmp_path: Path) -> None:
    child = run("import vllm, torchvision", cwd=tmp_path)
    assert child.returncode == 0, child.stderr


def test_only_what_torchvision_could_not_load_is_declared(has_operators: bool) -> None:
    child = run(
        "import torchvision\n"
        "from msdg_vllm import torchvision_ops\n"
        "print(torchvision_ops._library is None)"
    )
    assert child.stdout.strip() == str(has_operators), child.stderr


def test_without_the_start_up_file_a_cuda_build_beside_a_cpu_torch_fails(
    has_operators: bool,
) -> None:
    if has_operators:
        pytest.skip("the installed torchvision loads its own operators")
    child = run(UNINSTALL + "import torchvision")
    assert child.returncode == 1
    assert "operator torchvision::nms does not exist" in child.stderr


def test_nothing_is_declared_next_to_a_working_build() -> None:
    child = run(
        PRETEND_A_WORKING_BUILD + "import torchvision\n"
        "from msdg_vllm import torchvision_ops\n"
        "assert torchvision_ops._library is None"
    )
    assert child.returncode == 0, child.stderr


def test_the_hook_is_installed_once_and_imports_neither_torch_nor_vllm() -> None:
    child = run(
        "import sys\n"
        "from msdg_vllm import torchvision_ops\n"
        "torchvision_ops.install()\n"
        "finders = [f for f in sys.meta_path if isinstance(f, torchvision_ops._OperatorFinder)]\n"
        "assert len(finders) == 1\n"
        "assert not {'torch', 'vllm'} & set(sys.modules)"
    )
    assert child.returncode == 0, child.stderr


def test_the_hook_loads_no_module_beyond_its_own() -> None:
    child = run(
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "before = set(sys.modules)\n"
        "import msdg_vllm.torchvision_ops\n"
        "print(*sorted(set(sys.modules) - before))",
        "-S",  # other packages' start-up files would load modules of their own
    )
    assert child.stdout.split() == ["__future__", "msdg_vllm", "msdg_vllm.torchvision_ops"]


def test_a_left_over_start_up_file_is_silent(tmp_path: Path) -> None:
    child = run(f"exec(open({str(START_UP_FILE)!r}).read())", "-I", "-S", cwd=tmp_path)
    assert (child.returncode, child.stderr) == (0, "")

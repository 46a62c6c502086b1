"""Both lanes of `make test`: all tests are in one, and each has its cores."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.lanes import LANES, environments

ROOT = Path(__file__).parents[2]


def test_every_folder_of_tests_is_in_a_lane() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = sorted(folder for lane in LANES for folder in lane)
    assert folders == sorted(project["tool"]["pytest"]["ini_options"]["testpaths"])


@pytest.mark.parametrize(
    ("cores", "bound"), [([0, 1], ["0", "1"]), ([2, 3, 5, 7, 9], ["2,3", "5,7"]), ([0], None)]
)
def test_no_core_is_in_two_lanes(cores: list[int], bound: list[str] | None) -> None:
    told = environments(cores, 2)
    if bound is None:
        assert told == [{}, {}]
    else:
        assert [lane["VLLM_CPU_OMP_THREADS_BIND"] for lane in told] == bound


@pytest.mark.parametrize("failing", [None, "tests/unit", "tests/engine"])
def test_a_failure_in_either_lane_is_a_failure(tmp_path: Path, failing: str | None) -> None:
    for folder in (folder for lane in LANES for folder in lane):
        (tmp_path / folder).mkdir(parents=True)
        # Names differ, or pytest would take the second for the first.
        file = tmp_path / folder / f"test_{Path(folder).name}.py"
        file.write_text(f"def test_it():\n    assert {folder != failing}\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "from tests.lanes import main; raise SystemExit(main())"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == (failing is not None), done.stdout
    assert done.stdout.count(" in 0.") == 3  # the words of both lanes

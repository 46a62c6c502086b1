"""vLLM's CPU kernels can be loaded where libnuma is absent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm.platforms import current_platform

from msdg_vllm.numa_stand_in import load_if_missing, shared_library
from tests.bare_machine import bare_environment

LOAD_KERNELS = """
import torch
from vllm.platforms import current_platform
current_platform.import_kernels()
torch.ops._C.init_cpu_memory_env([0])
print("loaded")
"""
CALL = """
import ctypes
from msdg_vllm.numa_stand_in import load_if_missing
assert load_if_missing() is True
assert load_if_missing() is False
print(ctypes.CDLL("libnuma.so.1").numa_available())
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    hidden = bare_environment(folder)["LD_LIBRARY_PATH"]
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LD_LIBRARY_PATH": hidden},
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_answers_that_there_is_no_numa_and_is_loaded_once(tmp_path: Path) -> None:
    child = run(CALL, tmp_path)
    assert (child.stdout, child.stderr) == ("-1\n", "")


def test_vllms_kernels_load_and_start_without_libnuma(tmp_path: Path) -> None:
    if not current_platform.is_cpu():
        pytest.skip("the GPU build of vLLM is installed")
    child = run(LOAD_KERNELS, tmp_path)
    assert child.stdout.endswith("loaded\n"), child.stderr


def test_a_machine_with_libnuma_is_left_alone() -> None:
    if subprocess.run(
        [sys.executable, "-c", "import ctypes; ctypes.CDLL('libnuma.so.1')"]
    ).returncode:
        pytest.skip("no libnuma here")
    assert load_if_missing() is False


@pytest.mark.parametrize(("machine", "number"), [("x86_64", 62), ("aarch64", 183)])
def test_it_is_an_elf_library_for_its_processor(machine: str, number: int) -> None:
    library = shared_library(machine)
    assert library[:7] == b"\x7fELF\x02\x01\x01"
    assert library[18:20] == number.to_bytes(2, "little")

"""The `msdg-vllm` command: what it prints by itself, and that it runs our server and no other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import msdg_vllm
from msdg_vllm import cli

COMMAND = Path(sys.prefix) / "bin" / "msdg-vllm"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"msdg-vllm {name} " in said for name in cli.COMMANDS)
    assert "msdg-vllm serve MODEL [options of vllm serve]" in said


def test_no_command_is_answered_with_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "msdg-vllm serve MODEL" in capsys.readouterr().out


def test_the_version_names_vllms_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"msdg-vllm {msdg_vllm.__version__} (vllm")


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sreve", "models/scenes-llava"]) == 2
    assert capsys.readouterr().err == (
        "msdg-vllm: error: no command 'sreve'; there is serve, calibrate: msdg-vllm --help\n"
    )


def test_help_and_version_load_neither_vllm_nor_torch() -> None:
    code = (
        "import sys; from msdg_vllm import cli; cli.main(['--help']); cli.main(['--version']);"
        "assert not {'torch', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_python_m_server_is_a_synonym(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "server", "--help=msdg-vllm"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--default-retention" in done.stdout


def test_a_server_py_in_the_working_directory_is_not_run_instead(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text("raise SystemExit('hijacked')\n")
    done = subprocess.run(
        [COMMAND, "serve", "--help=msdg-vllm"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "hijacked" not in done.stderr
    assert (done.returncode, "--default-retention" in done.stdout) == (0, True)


def test_the_module_is_the_command_too() -> None:
    command = [sys.executable, "-m", "msdg_vllm.cli", "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith("msdg-vllm ")

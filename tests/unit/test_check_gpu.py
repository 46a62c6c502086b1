"""`make check-gpu` runs what a machine allows, and says what it left out."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.serving.__main__ import OUTPUT, make_parser
from tests.device import __main__ as command
from tests.device.checks import CHECKS, ENGINE_TESTS, Check
from tests.device.machine import Machine, machine
from tests.device.report import FAILED, PASSED, SKIPPED, Outcome, report

ROOT = Path(__file__).parents[2]
BARE = Machine((), 2, ("torch 2",), "abc", "some/model", has_model=False)


def python(code: str, **options: int) -> Check:
    return Check("some", "something", lambda _: [sys.executable, "-c", code], **options)  # type: ignore[arg-type]


def test_every_file_of_engine_tests_is_run() -> None:
    named = {word for check in CHECKS for word in check.command(BARE) if word.endswith(".py")}
    assert named == {f"tests/engine/{path.name}" for path in ENGINE_TESTS.glob("test_*.py")}
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert all(check.shows for check in CHECKS)
    assert {"kernels", "llava", "qwen2_5_vl", "tensor_parallel", "serving"} <= set(names)


@pytest.mark.parametrize(
    ("code", "result"),
    [("print('fine')", PASSED), ("raise SystemExit(5)", SKIPPED), ("1 / 0", FAILED)],
)
def test_a_check_is_what_its_process_says(code: str, result: str) -> None:
    assert command.run(python(code), BARE).result == result


def test_a_check_that_hangs_fails() -> None:
    hanging = python("print('here', flush=True); import time; time.sleep(60)")
    outcome = command.run(replace(hanging, minutes=1 / 60), BARE)
    assert outcome.result == FAILED
    assert "ended after" in outcome.summary


def test_what_a_machine_lacks_is_said() -> None:
    assert python("", num_gpus=1).lacks(BARE) == "needs 1 GPU, and there is none"
    assert python("", num_cores=2).lacks(BARE) is None
    one_gpu = replace(BARE, gpus=("A100",))
    assert python("", num_cores=2).lacks(one_gpu) == "needs 2 GPUs, and there is 1"
    assert "some/model are not at hand" in str(python("", needs_model=True).lacks(one_gpu))


def test_the_report_names_what_failed_and_what_was_not_run() -> None:
    outcomes = [
        Outcome(python(""), SKIPPED, "needs 1 GPU"),
        Outcome(replace(python(""), name="llava"), FAILED, "1 failed | 2 passed", 6.0, "the end"),
    ]
    page = report(BARE, outcomes, "0.0003")
    assert "nothing below ran on a GPU" in page
    assert "## Not run\n\n- some: needs 1 GPU\n" in page
    assert "| llava | something | failed | 0.1 | 1 failed / 2 passed |" in page
    assert "## llava\n\n```\nthe end\n```" in page
    assert "0.0003" in report(replace(BARE, gpus=("A100",)), outcomes, "0.0003")


def test_single_tests_that_were_skipped_and_waits_are_listed() -> None:
    output = """.s
    /lib/msdg_vllm/some.py:12: UserWarning: called a synchronizing CUDA operation (Triggered ...)
    /lib/msdg_vllm/some.py:12: UserWarning: called a synchronizing CUDA operation (Triggered ...)
    /lib/vllm/other.py:7: UserWarning: Tensor.to: a copy. Implicit GPU<->CPU sync detected - use
SKIPPED [2] tests/engine/test_lora.py:8: needs a GPU
1 passed, 2 skipped in 0.1s
an engine's last word
"""
    done = python(f"print({output!r})")
    outcome = command.run(done, BARE)
    assert outcome.summary == "1 passed, 2 skipped in 0.1s"
    page = report(replace(BARE, gpus=("A100",)), [outcome], "0.0003")
    assert "## Not run\n\n- in some: [2] tests/engine/test_lora.py:8: needs a GPU\n" in page
    assert "- /lib/msdg_vllm/some.py:12: 2\n- /lib/vllm/other.py:7: 1\n" in page


def test_the_serving_benchmark_understands_its_command() -> None:
    (serving,) = [check for check in CHECKS if check.name == "serving"]
    arguments = make_parser().parse_args(serving.command(BARE)[3:])
    assert (arguments.command, arguments.model) == ("run", "some/model")
    assert arguments.results != OUTPUT
    assert arguments.server_options == ["--gpu-memory-utilization", "0.4"]


def test_on_a_machine_without_a_gpu_it_runs_and_skips_the_kernels(tmp_path: Path) -> None:
    if machine("none").num_gpus:
        pytest.skip("there is a GPU")
    run = subprocess.run(
        [sys.executable, "-m", "tests.device", "--only", "kernels", "--report", "report.md"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    page = (tmp_path / "report.md").read_text()
    assert "- kernels: needs 1 GPU, and there is none" in page
    assert re.search(r"^- .*llava, .*: not asked for \(--only\)$", page, re.MULTILINE)

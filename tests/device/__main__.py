"""Run the checks that this machine allows, and write one report to attach to an issue.

    make check-gpu
    make check-gpu ARGS='--only kernels --only llava --report report.md'

On a machine without a GPU the same engine tests run on its CPU, and the report says what was not
shown. Ends with 1 if a check failed.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.device.checks import CHECKS, Check
from tests.device.machine import Machine, machine
from tests.device.report import FAILED, PASSED, SKIPPED, Outcome, report

REPORT = Path("check-gpu.md")
# Three times that of a CPU, for sums in another order. `python -m tests.device.tolerance` says what
# rounding does, and that TF32, which vLLM's attention would use for float32, does too much.
TOLERANCE = "0.0003"


def main() -> int:
    """Run the checks one after the other."""
    parser = argparse.ArgumentParser(prog="make check-gpu", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--only",
        action="append",
        choices=[check.name for check in CHECKS],
        help="run this check alone; can be given more than once",
    )
    parser.add_argument("--report", type=Path, default=REPORT, help="default: %(default)s")
    parser.add_argument(
        "--model", default="llava-hf/llava-1.5-7b-hf", help="served by the benchmark, if at hand"
    )
    arguments = parser.parse_args()
    here = machine(arguments.model)
    outcomes: list[Outcome] = []
    for check in CHECKS:
        if arguments.only and check.name not in arguments.only:
            outcomes.append(Outcome(check, SKIPPED, "not asked for (--only)"))
        elif (reason := check.lacks(here)) is not None:
            outcomes.append(Outcome(check, SKIPPED, reason))
        else:
            print(f"{check.name}: {check.shows}", flush=True)
            outcomes.append(run(check, here))
        print(f"{check.name}: {outcomes[-1].result}, {outcomes[-1].summary}", flush=True)
        # After each check, so that a machine that goes down leaves what is known.
        arguments.report.write_text(report(here, outcomes, TOLERANCE), encoding="utf-8")
    print(f"The report is in {arguments.report}; attach it to an issue.")
    return int(any(outcome.result == FAILED for outcome in outcomes))


def run(check: Check, here: Machine) -> Outcome:
    """Run one check in a process of its own."""
    environment = {**os.environ, **check.environment}
    environment.setdefault("MSDG_TEST_EVERY_FAMILY", "1")
    if here.num_gpus:
        environment.setdefault("VLLM_GPU_SYNC_CHECK", "warn")
        environment.setdefault("MSDG_TEST_TOLERANCE", TOLERANCE)
        environment.setdefault("TRITON_F32_DEFAULT", "ieee")
    started = time.monotonic()
    try:
        done = subprocess.run(
            check.command(here),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=check.minutes * 60,
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        # Bytes even where text was asked for.
        said = (error.stdout or b"").decode(errors="replace")
        code, output = 1, f"{said}\nended after {check.minutes} minutes"
    seconds = time.monotonic() - started
    # Pytest ends with 5 when no test was left to run.
    result = {0: PASSED, 5: SKIPPED}.get(code, FAILED)
    return Outcome(check, result, _summary(output), seconds, output)


def _summary(output: str) -> str:
    """What pytest counted, or else the last line: engines may write behind pytest."""
    lines = [line for line in output.splitlines() if line.strip()]
    counted = [
        line for line in lines if re.search(r"\d+ (passed|failed|skipped|error).* in ", line)
    ]
    return (counted or lines or ["no output"])[-1]


if __name__ == "__main__":
    sys.exit(main())

"""One page of Markdown about what was run, and what was not."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from tests.device.checks import Check
from tests.device.machine import Machine

Result = Literal["passed", "failed", "skipped"]
PASSED: Result = "passed"
FAILED: Result = "failed"
SKIPPED: Result = "skipped"

_TAIL = 60  # lines of a failed check
# What vLLM's check says of a wait, behind the place of the call.
_WAIT = re.compile(
    r"(\S+:\d+): UserWarning: .*(?:synchronizing CUDA operation|GPU<->CPU sync)", re.MULTILINE
)
# What pytest says of tests that were not run.
_SKIPPED_TESTS = re.compile(r"^SKIPPED (\[\d+\] .+)$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """How a check ended."""

    check: Check
    result: Result
    summary: str
    seconds: float = 0.0
    output: str = ""


def report(machine: Machine, outcomes: list[Outcome], tolerance: str) -> str:
    """The report so far."""
    lines = [
        "# msdg-vllm on this machine",
        "",
        f"- commit {machine.commit}; {', '.join(machine.versions)}",
        f"- GPUs: {'; '.join(machine.gpus) or 'none: nothing below ran on a GPU'}",
        f"- cores: {machine.num_cores}",
    ]
    if machine.gpus:
        lines += [
            f"- log-probabilities may differ from Hugging Face's on the CPU by {tolerance} in "
            "float32 (0.0001 on a CPU); bfloat16 has its own check, and states its tolerance",
            "- vLLM's check for waits was on (VLLM_GPU_SYNC_CHECK=warn); what it found is below",
        ]
    lines += ["", "| check | shows | result | minutes | says |", "|---|---|---|---|---|"]
    lines += [
        f"| {o.check.name} | {_cell(o.check.shows)} | {o.result} | {o.seconds / 60:.1f} "
        f"| {_cell(o.summary)} |"
        for o in outcomes
        if o.result != SKIPPED
    ]
    lines += _not_run(outcomes)
    if machine.gpus:
        lines += _waits(outcomes)
    for outcome in outcomes:
        if outcome.result == FAILED:
            tail = "\n".join(outcome.output.splitlines()[-_TAIL:])
            lines += ["", f"## {outcome.check.name}", "", "```", tail, "```"]
    return "\n".join(lines) + "\n"


def _not_run(outcomes: list[Outcome]) -> list[str]:
    """Checks and single tests that were skipped, and why."""
    reasons: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.result == SKIPPED:
            reasons.setdefault(outcome.summary, []).append(outcome.check.name)
    lines = [f"- {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    for outcome in outcomes:
        for found in _SKIPPED_TESTS.findall(outcome.output):
            lines.append(f"- in {outcome.check.name}: {found}")
    return ["", "## Not run", "", *(lines or ["Nothing was left out."])]


def _waits(outcomes: list[Outcome]) -> list[str]:
    """Where the host waited for the device, and how often."""
    places = Counter(place for outcome in outcomes for place in _WAIT.findall(outcome.output))
    lines = [f"- {place}: {count}" for place, count in places.most_common()]
    return ["", "## Waits for the device", "", *(lines or ["None was reported."])]


def _cell(text: str) -> str:
    return text.strip("= ").replace("|", "/")

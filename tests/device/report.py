"""One page of Markdown about what was run, and what was not."""

from dataclasses import dataclass
from typing import Literal

from tests.device.checks import Check
from tests.device.machine import Machine

Result = Literal["passed", "failed", "skipped"]
PASSED: Result = "passed"
FAILED: Result = "failed"
SKIPPED: Result = "skipped"

_TAIL = 60  # lines of a failed check


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
            "- vLLM's check for waits was on (VLLM_GPU_SYNC_CHECK=warn); waits: "
            f"{sum(outcome.output.count('synchroniz') for outcome in outcomes)} lines",
        ]
    lines += ["", "| check | result | minutes | says |", "|---|---|---|---|"]
    lines += [
        f"| {o.check.name} | {o.result} | {o.seconds / 60:.1f} | {_cell(o.summary)} |"
        for o in outcomes
    ]
    lines += ["", "What each shows:", ""]
    lines += [f"- {o.check.name}: {o.check.shows}" for o in outcomes]
    for outcome in outcomes:
        if outcome.result == FAILED:
            tail = "\n".join(outcome.output.splitlines()[-_TAIL:])
            lines += ["", f"## {outcome.check.name}", "", "```", tail, "```"]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.strip("= ").replace("|", "/")

"""What became of a fault, and the table of all."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """One try of one fault.

    Attributes:
        fault: What was done.
        survived: Whether the server ended up where docs/reliability.md says.
        seconds: How long that took.
        note: What was seen.
    """

    fault: str
    survived: bool
    seconds: float
    note: str


def table(outcomes: Iterable[Outcome]) -> str:
    """Return a Markdown table: each fault once, with how often it was survived."""
    by_fault: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_fault.setdefault(outcome.fault, []).append(outcome)
    lines = ["| fault | survived | seconds, worst | what was seen |", "|---|---|---|---|"]
    for fault, tries in by_fault.items():
        survived = sum(outcome.survived for outcome in tries)
        worst = max(outcome.seconds for outcome in tries)
        failed = [outcome.note for outcome in tries if not outcome.survived]
        note = failed[0] if failed else tries[-1].note
        lines.append(f"| {fault} | {survived} of {len(tries)} | {worst:.1f} | {note} |")
    return "\n".join(lines)

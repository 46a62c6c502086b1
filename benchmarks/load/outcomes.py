"""What became of the requests of a load: who got a first token in time, and how much was kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shared.estimate import percentile


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request: when it came, when its first token came after that, and what it kept.

    A request that failed has no time and counts as late.
    """

    arrived: float
    ttft: float | None
    retention: float


def share_within(outcomes: Sequence[Outcome], target: float) -> float:
    """Return the share of requests whose first token came in time."""
    return sum(one.ttft is not None and one.ttft <= target for one in outcomes) / len(outcomes)


def table(results: Mapping[str, Sequence[Outcome]], target: float) -> str:
    """Return a table in Markdown, a row for each policy."""
    lines = [
        f"| policy | requests | within {target:g} s | p50 | p95 | mean retention | answers/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for policy, outcomes in results.items():
        times = [one.ttft for one in outcomes if one.ttft is not None]
        kept = sum(one.retention for one in outcomes) / len(outcomes)
        last = max(one.arrived + (one.ttft or 0.0) for one in outcomes)
        lines.append(
            f"| {policy} | {len(outcomes)} | {share_within(outcomes, target):.1%} | "
            f"{percentile(times, 50):.2f} s | {percentile(times, 95):.2f} s | {kept:.2f} | "
            f"{len(times) / last:.2f} |"
        )
    return "\n".join(lines)


def plot(results: Mapping[str, Sequence[Outcome]], target: float, title: str, path: Path) -> None:
    """Draw times to first token and retentions by time of arrival."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    for policy, outcomes in results.items():
        came = [one.arrived for one in outcomes]
        times = [float("nan") if one.ttft is None else one.ttft for one in outcomes]
        upper.plot(came, times, ".-", linewidth=0.8, markersize=4, label=policy)
        lower.plot(came, [one.retention for one in outcomes], ".-", linewidth=0.8, markersize=4)
    upper.axhline(target, color="grey", linestyle="--", linewidth=1)
    upper.set(ylabel="time to first token (s)", yscale="log", title=title)
    upper.legend()
    lower.set(xlabel="arrival (s)", ylabel="retention", ylim=(0, 1.05))
    figure.savefig(path)

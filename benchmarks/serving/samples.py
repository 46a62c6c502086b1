"""What a run of `benchmarks.serving` measured, and what follows from it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.shared.estimate import Estimate

STOCK, PRUNING, TEXT = "stock", "msdg", "text"
GOAL_COST, GOAL_LIMIT, GOAL_LIMIT_AT, GOAL_SELECTION = 0.02, 0.15, 0.111, 0.02


@dataclass(frozen=True, slots=True)
class Sample:
    """One request, alone on its server.

    Attributes:
        round: Which round of all cases; samples of one round are neighbours in time.
        case: `stock` (stock vLLM, an image), `msdg` (this server, an image) or `text` (stock vLLM,
            as many tokens of text as `msdg` has at this retention).
        retention: 1.0 for `stock`.
        ttft: Seconds.
        latency: Seconds.
        prompt_tokens: Tokens that the KV cache holds for the prompt.
        encoder: Seconds in the model's `embed_multimodal`; 0 without an image.
        selection: Seconds of analysis and selection, a part of `encoder`; 0 without pruning.
    """

    round: int
    case: str
    retention: float
    ttft: float
    latency: float
    prompt_tokens: int
    encoder: float = 0.0
    selection: float = 0.0


@dataclass(frozen=True, slots=True)
class Burst:
    """As many requests as fit at once on one server, until all are answered.

    Attributes:
        round: Which round of all cases.
        case: `stock` or `msdg`.
        retention: 1.0 for `stock`.
        num_requests: How many were answered.
        seconds: From the first request to the last answer.
        prompt_tokens: Prompt tokens that the server counted meanwhile.
    """

    round: int
    case: str
    retention: float
    num_requests: int
    seconds: float
    prompt_tokens: int

    @property
    def requests_per_second(self) -> float:
        return self.num_requests / self.seconds


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal, and whether the run met it."""

    text: str
    measured: str
    is_met: bool


@dataclass(frozen=True, slots=True)
class Results:
    """A whole run.

    Attributes:
        source: The command, commit, machine, versions, model and options.
        samples: Requests one at a time.
        bursts: Requests at saturation.
    """

    source: dict[str, Any]
    samples: list[Sample]
    bursts: list[Burst]

    def save(self, path: Path) -> None:
        """Write as JSON, one measurement per line."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = {
            name: ",\n  ".join(json.dumps(asdict(entry)) for entry in entries)
            for name, entries in (("samples", self.samples), ("bursts", self.bursts))
        }
        source = json.dumps(self.source, indent=1)
        path.write_text(
            f'{{"source": {source},\n "samples": [\n  {lines["samples"]}],\n'
            f' "bursts": [\n  {lines["bursts"]}]}}\n'
        )

    @classmethod
    def load(cls, path: Path) -> "Results":
        """Read what `save` wrote."""
        data = json.loads(path.read_text())
        return cls(
            data["source"],
            [Sample(**entry) for entry in data["samples"]],
            [Burst(**entry) for entry in data["bursts"]],
        )

    @property
    def retentions(self) -> list[float]:
        """The retentions that were measured, largest first."""
        return sorted({s.retention for s in self.samples if s.case == PRUNING}, reverse=True)

    def of(self, case: str, retention: float = 1.0) -> list[Sample]:
        """Return the samples of a case by round."""
        chosen = [s for s in self.samples if (s.case, s.retention) == (case, retention)]
        return sorted(chosen, key=lambda sample: sample.round)

    def bursts_of(self, case: str, retention: float = 1.0) -> list[Burst]:
        """Return the bursts of a case by round."""
        chosen = [b for b in self.bursts if (b.case, b.retention) == (case, retention)]
        return sorted(chosen, key=lambda burst: burst.round)

    def limits(self, retention: float) -> list[float]:
        """Return the least TTFT there can be, by round, taken from stock vLLM alone.

        Encoder time, plus the TTFT of a text that is as long as the pruned prompt.
        """
        texts = [sample.ttft for sample in self.of(TEXT, retention)]
        return [sample.encoder + text for sample, text in zip(self.of(STOCK), texts, strict=True)]

    def against_stock(self, value: Callable[[Sample], float], retention: float) -> Estimate:
        """Estimate a value relative to that of stock vLLM in the same round."""
        ours, stock = self.of(PRUNING, retention), self.of(STOCK)
        return Estimate.of_ratios(list(map(value, ours)), list(map(value, stock)))

    def throughput_against_stock(self, retention: float) -> Estimate:
        """Estimate requests per second relative to stock vLLM in the same round."""
        return Estimate.of_ratios(
            [b.requests_per_second for b in self.bursts_of(PRUNING, retention)],
            [b.requests_per_second for b in self.bursts_of(STOCK)],
        )

    def against_limit(self, retention: float) -> Estimate:
        """Estimate TTFT relative to the limit of the same round."""
        ttft = [sample.ttft for sample in self.of(PRUNING, retention)]
        return Estimate.of_ratios(ttft, self.limits(retention))

    def selection_share(self, retention: float) -> Estimate:
        """Estimate analysis and selection relative to stock vLLM's encoder time."""
        return Estimate.of_ratios(
            [sample.selection for sample in self.of(PRUNING, retention)],
            [sample.encoder for sample in self.of(STOCK)],
        )

    def goals(self) -> list[Goal]:
        """Check the goals of this benchmark."""
        cost = self.against_stock(lambda sample: sample.ttft, 1.0)
        rates = self.throughput_against_stock(1.0)
        lost = Estimate(1 / rates.median, 1 / rates.high, 1 / rates.low)
        pruned = [retention for retention in self.retentions if retention < 1]
        ttft = [Estimate.of([s.ttft for s in self.of(PRUNING, r)]).median for r in self.retentions]
        rate = [
            Estimate.of([b.requests_per_second for b in self.bursts_of(PRUNING, r)]).median
            for r in self.retentions
        ]
        share = max(self.selection_share(retention).median for retention in pruned)
        goals = [
            Goal(
                f"retention 1.0 costs at most {GOAL_COST:.0%} over stock vLLM",
                f"TTFT {_excess(cost)}; time per request at saturation {_excess(lost)}",
                max(cost.median, lost.median) - 1 <= GOAL_COST,
            ),
            Goal(
                "TTFT falls with every step of retention",
                " → ".join(f"{seconds:.2f} s" for seconds in ttft),
                _is_falling(ttft),
            ),
            Goal(
                "throughput grows with every step of retention",
                " → ".join(f"{one:.2f}/s" for one in rate),
                _is_falling([-one for one in rate]),
            ),
            Goal(
                f"analysis and selection take at most {GOAL_SELECTION:.0%} of the encoder's time",
                f"{share:.1%}",
                share <= GOAL_SELECTION,
            ),
        ]
        if GOAL_LIMIT_AT in pruned:
            above = self.against_limit(GOAL_LIMIT_AT)
            goals.insert(
                1,
                Goal(
                    f"TTFT at {GOAL_LIMIT_AT} is within {GOAL_LIMIT:.0%} of the limit",
                    _excess(above),
                    above.median - 1 <= GOAL_LIMIT,
                ),
            )
        return goals


def _is_falling(values: Sequence[float]) -> bool:
    return all(later < earlier for earlier, later in pairwise(values))


def _excess(ratio: Estimate) -> str:
    low, high = ratio.low - 1, ratio.high - 1
    return f"{ratio.median - 1:+.1%} ({low:+.1%} to {high:+.1%})"

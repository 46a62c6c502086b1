"""The tables of the paper: which model, which columns, and the numbers it reports.

`expected.json` holds the numbers, copied from the paper by label; a test derives every RelAcc of it
from the scores beside it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from msdg_vllm.core.profiles import EncoderProfile, built_in_profile

EXPECTED = Path(__file__).parent / "expected.json"
OURS = "msdg"
# Rows that the paper does not have, by how the encoder takes images.
RIVALS = ("cen_divprune", "cen_cdpruner", "pool")
RIVALS_AT_ANY_SIZE = (*RIVALS, "resize", "resize+msdg")


@dataclass(frozen=True, slots=True)
class Setting:
    """What a server must do to measure a row: a method, and fields of the profile it differs in."""

    method: str = OURS
    profile: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table at one retention, as the paper reports it; None where it reports none."""

    name: str
    retention: float
    scores: tuple[float | None, ...]
    relacc: float | None = None
    milliseconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Table:
    """One table.

    Attributes:
        label: How the paper's source calls it.
        model: The checkpoint to serve, by its name on the Hugging Face hub.
        encoder: The built-in profile that the paper used, None to accept any.
        columns: Benchmarks, in the order of all scores; keys of `columns.BENCHMARKS`.
        unpruned: The paper's scores without pruning; empty where there is no paper to compare to.
        served: For each row that a server of ours can produce, how.
    """

    name: str
    label: str
    title: str
    model: str
    architecture: str
    encoder: str | None
    columns: tuple[str, ...]
    retentions: tuple[float, ...]
    served: Mapping[str, Setting]
    unpruned: tuple[float, ...] = ()
    unpruned_milliseconds: Mapping[str, float] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()

    @property
    def times_requests(self) -> bool:
        """Whether the paper reports latencies here, so that requests must go one by one."""
        return bool(self.unpruned_milliseconds)

    @property
    def profile_of_paper(self) -> EncoderProfile | None:
        """The profile of the paper's main results; None if any will do."""
        return None if self.encoder is None else built_in_profile(self.encoder)

    def profile_of(self, row: str) -> EncoderProfile | None:
        """Return the profile the server must have for `row`; None if any will do."""
        paper = self.profile_of_paper
        return None if paper is None else replace(paper, **self.served[row].profile)

    def paper_row(self, name: str, retention: float) -> Row | None:
        """Return what the paper reports for a row at a retention."""
        found = [row for row in self.rows if (row.name, row.retention) == (name, retention)]
        return found[0] if found else None


def relative_accuracy(
    scores: Sequence[float | None], unpruned: Sequence[float | None]
) -> float | None:
    """RelAcc: the mean over benchmarks of score / unpruned score, in percent.

    Benchmarks that miss either score are left out, as the paper does; None if all do.
    """
    ratios = [
        score / base
        for score, base in zip(scores, unpruned, strict=True)
        if score is not None and base
    ]
    return 100 * sum(ratios) / len(ratios) if ratios else None


@cache
def paper_tables() -> dict[str, Table]:
    """Return the tables of the paper by the names that the command line uses."""
    read = json.loads(EXPECTED.read_text(encoding="utf-8"))
    return {name: _table(name, fields) for name, fields in read.items()}


def _table(name: str, fields: dict[str, Any]) -> Table:
    rows = tuple(
        Row(
            row["name"],
            row["retention"],
            tuple(row["scores"]),
            row.get("relacc"),
            row.get("ms", {}),
        )
        for row in fields["rows"]
    )
    return Table(
        name=name,
        label=fields["label"],
        title=fields["title"],
        model=fields["model"],
        architecture=fields["architecture"],
        encoder=fields["encoder"],
        columns=tuple(fields["columns"]),
        retentions=tuple(sorted({row.retention for row in rows}, reverse=True)),
        served={
            **{row: Setting(**setting) for row, setting in fields["served"].items()},
            **_rivals(fields),
        },
        unpruned=tuple(fields["unpruned"]),
        unpruned_milliseconds=fields.get("unpruned_ms", {}),
        rows=rows,
    )


def _rivals(fields: dict[str, Any]) -> dict[str, Setting]:
    """Rows of methods newer than the paper, in tables that compare methods."""
    if "Ours" not in fields["served"]:
        return {}
    names = RIVALS_AT_ANY_SIZE if "Qwen" in fields["architecture"] else RIVALS
    return {name: Setting(name) for name in names}

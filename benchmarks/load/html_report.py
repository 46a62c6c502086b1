"""The report of a load run: a table and plots by retention, in one HTML file."""

import html
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from benchmarks.shared.estimate import percentile
from benchmarks.shared.provenance import show
from benchmarks.shared.retention_mix import show_retention

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Load report</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; }}
table {{ border-collapse: collapse; margin: 1rem 0; }}
td {{ white-space: nowrap; }}
th, td {{ padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child {{ text-align: left; }}
svg {{ max-width: 100%; height: auto; }}
code, .source {{ color: #555; font-size: 13px; }}
</style></head><body>
<h1>Load report</h1>
<p>{introduction}</p>
{table}
{figure}
<p class="source"><code>{command}</code><br>{source}</p>
</body></html>
"""
INTRODUCTION = (
    "{num_answers} streamed answers in {num_conversations} conversations of one to three turns; "
    "retentions take turns, so all of them saw the same server under the same load. TTFT: time to "
    "the first token; TPOT: time per output token after the first. Later turns find their picture "
    "in the server's caches."
)


@dataclass(frozen=True, slots=True)
class Row:
    """What one retention cost; times in seconds, None where nothing was measured."""

    name: str
    num_answers: int
    first_ttft: list[float]
    later_ttft: list[float]
    tpot: list[float]
    latency: list[float]
    prompt_tokens: float
    visual_tokens: float | None


def rows_of(answers: Sequence[dict[str, Any]]) -> list[Row]:
    """Return a row per retention, largest first; requests without one come before all."""
    retentions = {answer["retention"] for answer in answers}
    ordered = sorted(retentions, key=lambda one: -2.0 if one is None else -one)
    return [_row(one, [a for a in answers if a["retention"] == one]) for one in ordered]


def _row(retention: float | None, answers: list[dict[str, Any]]) -> Row:
    visual = [a["visual_tokens"] for a in answers if a["visual_tokens"] is not None]
    first = [a for a in answers if a["turn"] == 1]
    return Row(
        name=show_retention(retention),
        num_answers=len(answers),
        first_ttft=[a["ttft"] for a in first],
        later_ttft=[a["ttft"] for a in answers if a["turn"] > 1],
        tpot=[a["tpot"] for a in answers if a["tpot"] is not None],
        latency=[a["latency"] for a in answers],
        # Later prompts carry what was said before.
        prompt_tokens=statistics.mean(a["prompt_tokens"] for a in first) if first else 0.0,
        visual_tokens=statistics.mean(visual) if visual else None,
    )


COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("", lambda row: row.name),
    ("answers", lambda row: str(row.num_answers)),
    ("visual tokens", lambda row: f"{row.visual_tokens:.0f}" if row.visual_tokens else "-"),
    ("prompt tokens, first turn", lambda row: f"{row.prompt_tokens:.0f}"),
    ("TTFT p50", lambda row: _milliseconds(row.first_ttft, 50)),
    ("TTFT p95", lambda row: _milliseconds(row.first_ttft, 95)),
    ("TTFT p50, later turns", lambda row: _milliseconds(row.later_ttft, 50)),
    ("TPOT p50", lambda row: _milliseconds(row.tpot, 50)),
    ("latency p50", lambda row: _milliseconds(row.latency, 50)),
    ("latency p95", lambda row: _milliseconds(row.latency, 95)),
)


def _milliseconds(values: Sequence[float], percent: float) -> str:
    return f"{percentile(values, percent) * 1000:.0f} ms" if values else "-"


def text_table(rows: Sequence[Row]) -> str:
    """Return the rows for a terminal."""
    cells = [[name for name, _ in COLUMNS], *([cell(row) for _, cell in COLUMNS] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in cells)
    )


def _html_table(rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name, _ in COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell(row))}</td>" for _, cell in COLUMNS) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def figure(rows: Sequence[Row]) -> str:
    """Return the plots as SVG: how TTFT, TPOT and latency are spread at each retention."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, grid = pyplot.subplots(2, 2, figsize=(10, 7), layout="constrained")
    plots: tuple[tuple[str, Callable[[Row], list[float]]], ...] = (
        ("TTFT, first turn", lambda row: row.first_ttft),
        ("TTFT, later turns", lambda row: row.later_ttft),
        ("time per output token", lambda row: row.tpot),
        ("latency of an answer", lambda row: row.latency),
    )
    for axes, (title, values_of) in zip(grid.flat, plots, strict=True):
        for row in rows:
            values = sorted(value * 1000 for value in values_of(row))
            if values:
                shares = [place / len(values) for place in range(1, len(values) + 1)]
                axes.step(values, shares, where="post", label=row.name)
        axes.set_title(title)
        axes.set_xlabel("ms")
        axes.set_ylabel("share of answers within")
        axes.set_ylim(0, 1.02)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    handles, names = grid.flat[0].get_legend_handles_labels()
    drawing.legend(handles, names, loc="outside upper center", ncols=len(names), frameon=False)
    with StringIO() as file:
        drawing.savefig(file, format="svg", metadata={"Date": None})
        pyplot.close(drawing)
        svg = file.getvalue()
    return svg[svg.index("<svg") :]


def write_report(answers: Sequence[dict[str, Any]], source: dict[str, Any], path: Path) -> str:
    """Write the HTML report; returns its table for a terminal."""
    rows = rows_of(answers)
    introduction = INTRODUCTION.format(
        num_answers=len(answers), num_conversations=sum(a["turn"] == 1 for a in answers)
    )
    path.write_text(
        PAGE.format(
            introduction=html.escape(introduction),
            table=_html_table(rows),
            figure=figure(rows),
            command=html.escape(source["command"]),
            source=html.escape(f"Endpoint: {source['endpoint']}. {show(source)}"),
        )
    )
    return text_table(rows)

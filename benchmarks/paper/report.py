"""A table as Markdown: what was measured here, and below it what the paper reports."""

from collections.abc import Mapping, Sequence

from benchmarks.paper.cells import Cell, CellStore
from benchmarks.paper.published import Row, Table, relative_accuracy

_NOTHING = "–"


def render(table: Table, store: CellStore) -> str:
    """Return the table with every row of which something has been measured."""
    lines = [f"### {table.title} ({table.model}; {table.label})", ""]
    head = ["", "retention", "numbers", *table.columns, "RelAcc", "prompt tokens"]
    head += ["inference ms", "prefill ms"] if table.times_requests else []
    lines += [_line(head), "|" + "---|" * 3 + "---:|" * (len(head) - 3)]
    some = next(iter(table.served))
    unpruned = _cells(table, store, some, 1.0)
    base = [cell.score if cell else None for cell in unpruned]
    lines += _pair(table, "Unpruned", 1.0, unpruned, base, _paper_unpruned(table))
    for row in table.served:
        for retention in table.retentions:
            cells = _cells(table, store, row, retention)
            if any(cells):
                paper = table.paper_row(row, retention)
                lines += _pair(table, row, retention, cells, base, paper)
    return "\n".join([*lines, "", *_notes(table, store)])


def _notes(table: Table, store: CellStore) -> list[str]:
    notes = ["RelAcc: mean of score / unpruned score, each source by its own unpruned scores."]
    if store.limit:
        notes.append(
            f"**Measured on the first {store.limit} questions of each task only: this shows that "
            "everything runs, and cannot be compared with the paper.**"
        )
    if table.times_requests:
        notes.append(
            "Times: the paper's on an A800 with its own code; measured ones are vLLM's means per "
            "request, one request at a time, nothing from caches, image encoding within prefill."
        )
    return notes


def _pair(
    table: Table,
    name: str,
    retention: float,
    cells: Sequence[Cell | None],
    base: Sequence[float | None],
    paper: Row | None,
) -> list[str]:
    """Two lines that never share a number: measured, then the paper's."""
    scores = [cell.score if cell else None for cell in cells]
    done = [cell for cell in cells if cell]
    tokens = [f"{_mean_tokens(done):.0f}" if done else _NOTHING]
    measured = [name, f"{retention:g}", "measured", *map(_number, scores)]
    measured += [_relative(scores, base), *tokens]
    if table.times_requests:
        measured += _times(done[0].milliseconds if done else {})
    lines = [_line(measured)]
    if paper is not None:
        reported = ["", "", "paper", *map(_number, paper.scores)]
        reported += [f"{paper.relacc:.1f}" if paper.relacc is not None else _NOTHING, _NOTHING]
        reported += _times(paper.milliseconds) if table.times_requests else []
        lines.append(_line(reported))
    return lines


def _cells(table: Table, store: CellStore, row: str, retention: float) -> list[Cell | None]:
    return [store.read(table, row, retention, column) for column in table.columns]


def _paper_unpruned(table: Table) -> Row | None:
    if not table.unpruned:
        return None
    return Row("Unpruned", 1.0, table.unpruned, 100.0, table.unpruned_milliseconds)


def _mean_tokens(cells: Sequence[Cell]) -> float:
    asked = sum(cell.num_questions for cell in cells)
    return sum(cell.prompt_tokens * cell.num_questions for cell in cells) / asked


def _relative(scores: Sequence[float | None], base: Sequence[float | None]) -> str:
    value = relative_accuracy(scores, base)
    if value is None:
        return _NOTHING
    both = sum(score is not None and bool(b) for score, b in zip(scores, base, strict=True))
    # A mean over some columns is not the paper's number.
    return f"{value:.1f}" if both == len(scores) else f"{value:.1f} ({both} of {len(scores)})"


def _number(score: float | None) -> str:
    if score is None:
        return _NOTHING
    return f"{score:.0f}" if score >= 200 else f"{score:.1f}"


def _times(milliseconds: Mapping[str, float]) -> list[str]:
    times = [milliseconds.get(kind) for kind in ("inference", "prefill")]
    return [_NOTHING if time is None else f"{time:.1f}" for time in times]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"

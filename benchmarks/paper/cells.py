"""Cells: one benchmark at one retention, kept on disk so that a run goes on where it stopped."""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.paper.published import Table


@dataclass(frozen=True, slots=True)
class Cell:
    """A measured score and how it came about."""

    score: float
    num_questions: int
    prompt_tokens: float
    results: dict[str, Any]
    milliseconds: dict[str, float] = field(default_factory=dict)
    made_by: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CellStore:
    """The measured cells of all tables, below one folder.

    Cells belong to a model, not to a table: what tables share is measured once.
    """

    root: Path
    limit: int | None = None

    def folder(self, table: Table, row: str, retention: float, column: str) -> Path:
        """Return the folder of a cell, whether it has been measured or not."""
        how = "unpruned" if retention == 1.0 else _slug(table, row)
        parts = [table.model.split("/")[-1], how, f"{retention:g}", column]
        parts[-1] += "-alone" if table.times_requests else ""
        parts[-1] += f"-first-{self.limit}" if self.limit else ""
        return self.root.joinpath(*parts)

    def read(self, table: Table, row: str, retention: float, column: str) -> Cell | None:
        """Return a measured cell; None if there is none."""
        path = self.folder(table, row, retention, column) / "cell.json"
        return Cell(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None

    def write(self, cell: Cell, table: Table, row: str, retention: float, column: str) -> None:
        """Keep a cell; readers see all of it or nothing."""
        path = self.folder(table, row, retention, column) / "cell.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(cell), indent=1) + "\n", encoding="utf-8")
        draft.replace(path)


def _slug(table: Table, row: str) -> str:
    """A folder name for how a row is served: `msdg`, `msdg-saliency_window-0-5`."""
    setting = table.served[row]
    # The paper's own profile is the same setting, whether a table spells it out or not.
    differs = setting.profile if table.profile_of(row) != table.profile_of_paper else {}
    parts = [setting.method, *(f"{name}-{value}" for name, value in differs.items())]
    return re.sub(r"[^\w.-]+", "-", "-".join(parts)).strip("-")

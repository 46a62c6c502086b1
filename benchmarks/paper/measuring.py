"""Measuring a row of a table, cell by cell, on one server."""

import datetime
from dataclasses import dataclass

from tqdm import tqdm

from benchmarks.paper.cells import Cell, CellStore
from benchmarks.paper.columns import BENCHMARKS
from benchmarks.paper.evaluation import TASKS, Evaluator
from benchmarks.paper.published import Table
from benchmarks.paper.scenes_task import write_task
from benchmarks.paper.served import Endpoint, mean_milliseconds


@dataclass(frozen=True, slots=True)
class Measurement:
    """What is measured, with what, and where the cells go."""

    table: Table
    row: str
    endpoint: Endpoint
    evaluator: Evaluator
    store: CellStore
    concurrency: int = 32

    def run(self, columns: tuple[str, ...]) -> None:
        """Measure what is missing of the row and of the unpruned model; keep each cell at once."""
        retentions = (1.0, *self.table.retentions)
        cells = [(retention, column) for column in columns for retention in retentions]
        missing = [c for c in cells if self.store.read(self.table, self.row, *c) is None]
        with tqdm(total=len(cells), initial=len(cells) - len(missing), unit="cell") as bar:
            for retention, column in missing:
                bar.set_description(f"{self.table.name} {column} at {retention:g}")
                cell = self._measure(retention, column)
                self.store.write(cell, self.table, self.row, retention, column)
                bar.update()

    def _measure(self, retention: float, column: str) -> Cell:
        alone = self.table.times_requests
        model_args = {
            "model": self.endpoint.model,
            "base_url": f"{self.endpoint.url}/v1",
            "retention": retention,
            "method": self.table.served[self.row].method,
            "num_concurrent": 1 if alone else self.concurrency,
            "alone": alone,
        }
        started = datetime.datetime.now(datetime.UTC)
        folder = self.store.folder(self.table, self.row, retention, column)
        before = self.endpoint.times()
        with tqdm(unit="question", leave=False, desc="lmms-eval starts") as bar:

            def on_progress(done: int, total: int) -> None:
                bar.set_description("lmms-eval asks", refresh=False)
                bar.total, bar.n = total, done
                bar.refresh()

            outcome = self.evaluator.run(
                BENCHMARKS[column],
                folder / f"{started:%Y%m%dT%H%M%S}",
                model_args,
                limit=self.store.limit,
                include=write_task(self.store.root / "scenes") if column == "scenes" else TASKS,
                on_progress=on_progress,
            )
        return Cell(
            score=outcome.score,
            num_questions=outcome.num_questions,
            prompt_tokens=outcome.prompt_tokens,
            results=outcome.results,
            milliseconds=mean_milliseconds(before, self.endpoint.times()) if alone else {},
            made_by={
                "msdg_vllm": self.endpoint.version,
                "lmms_eval": self.evaluator.version,
                "model_args": model_args,
                "limit": self.store.limit,
                "started": started.isoformat(timespec="seconds"),
            },
        )

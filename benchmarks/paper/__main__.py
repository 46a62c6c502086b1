"""Measure a table of the paper on a running server through lmms-eval, beside the paper's numbers.

    python -m server --model llava-hf/llava-1.5-7b-hf                # a GPU, another terminal
    python -m benchmarks.paper llava15 --server http://127.0.0.1:8000

Every cell (benchmark, retention) is kept in --results as soon as it is measured; the same command
goes on where it stopped. docs/paper-benchmarks.md says what each table needs.
"""

import argparse
import sys
from collections.abc import Collection
from pathlib import Path

from benchmarks.paper.cells import CellStore
from benchmarks.paper.errors import EvaluationError
from benchmarks.paper.evaluation import Evaluator
from benchmarks.paper.measuring import Measurement
from benchmarks.paper.published import Table, paper_tables
from benchmarks.paper.report import render
from benchmarks.paper.scenes_task import SCENES
from benchmarks.paper.served import Endpoint
from benchmarks.shared.client import ServerError
from benchmarks.shared.provenance import ROOT

RESULTS = Path("runs/paper")
VENV = ROOT / ".venv-paper/bin/python"


def _parser(tables: dict[str, Table]) -> argparse.ArgumentParser:
    width = max(map(len, tables))
    listed = "\n".join(f"  {name:{width}}  {table.title}" for name, table in tables.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper",
        description=__doc__,
        epilog=f"tables:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("table", choices=tables, metavar="TABLE", help="one of those below")
    parser.add_argument("--server", default="http://127.0.0.1:8000", metavar="URL")
    parser.add_argument("--row", help="a row of the table (default: ours, or what is served)")
    parser.add_argument(
        "--columns", nargs="+", metavar="NAME", help="only these benchmarks of the table"
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="only the first N questions of each task: a trial"
    )
    parser.add_argument(
        "--concurrency", type=int, default=32, metavar="N", help="requests at once (default: 32)"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help=f"where cells are kept (default: {RESULTS})"
    )
    parser.add_argument(
        "--python",
        type=Path,
        default=VENV if VENV.is_file() else Path(sys.executable),
        help="interpreter that has lmms-eval (default: .venv-paper's if it exists, else this one)",
    )
    return parser


def _options(tables: dict[str, Table], arguments: list[str] | None) -> argparse.Namespace:
    parser = _parser(tables)
    options = parser.parse_args(arguments)
    table = tables[options.table]
    options.columns = tuple(options.columns or table.columns)

    def refuse_unless_among(option: str, value: str, allowed: Collection[str]) -> None:
        if value not in allowed:
            parser.error(f"{option} of {table.name} must be among {', '.join(allowed)}: {value!r}")

    for column in options.columns:
        refuse_unless_among("--columns", column, table.columns)
    if options.row is not None:
        refuse_unless_among("--row", options.row, table.served)
    for name in ("limit", "concurrency"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    return options


def _served_row(table: Table, endpoint: Endpoint) -> str:
    """Ours; where rows differ in profile, the one that is served."""
    if "Ours" in table.served:
        return "Ours"
    for row in table.served:
        if table.profile_of(row) == endpoint.profile:
            return row
    raise ServerError(
        f"no row of {table.name} has the encoder profile that is served ({endpoint.profile}); "
        f"name one with --row and be told which profile it needs: {', '.join(table.served)}"
    )


def main(arguments: list[str] | None = None) -> int:
    tables = {**paper_tables(), SCENES.name: SCENES}
    options = _options(tables, arguments)
    table = tables[options.table]
    store = CellStore(options.results, options.limit)
    try:
        endpoint = Endpoint.at(options.server)
        row = options.row or _served_row(table, endpoint)
        endpoint.check(table, row)
        evaluator = Evaluator.of(options.python)
        measurement = Measurement(table, row, endpoint, evaluator, store, options.concurrency)
        measurement.run(options.columns)
    except (EvaluationError, ServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    print(render(table, store))
    return 0


if __name__ == "__main__":
    sys.exit(main())

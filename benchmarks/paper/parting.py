"""Part the questions of measured cells as VTC-Bench does, and score rows on both parts.

    python -m benchmarks.paper qwen25vl --row resize     # measured before, as are the other rows
    python -m benchmarks.paper.parting qwen25vl --baseline resize

Of the questions that the unpruned model answers right, downsampling to the same budget loses group
A and keeps group B. Only benchmarks whose questions are scored one by one can be parted.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.paper.__main__ import RESULTS
from benchmarks.paper.cells import CellStore
from benchmarks.paper.columns import BENCHMARKS, Benchmark
from benchmarks.paper.published import Table, paper_tables
from benchmarks.paper.scenes_task import SCENES

# A question is answered when it has at least half of its points: VQA scores are thirds.
_ANSWERED = 0.5

Answered = dict[tuple[str, int], bool]
"""Whether each question was answered, by task and number."""


def answered(benchmark: Benchmark, folder: Path) -> Answered | None:
    """Read which questions of a cell were answered; None if nothing was kept of them."""
    found: Answered = {}
    (metric,) = benchmark.metrics[:1]
    for task in benchmark.tasks:
        # Of a cell that was measured again the last run counts.
        files = sorted(folder.glob(f"*/*/*_samples_{task}.jsonl"))
        for line in files[-1].read_text(encoding="utf-8").splitlines() if files else ():
            sample: dict[str, Any] = json.loads(line)
            score = sample.get(metric)
            if isinstance(score, bool) or not isinstance(score, int | float):
                return None
            found[task, int(sample["doc_id"])] = score >= _ANSWERED
    return found or None


def parted(whole: Answered, baseline: Answered) -> tuple[set[Any], set[Any]]:
    """Return groups A and B: what downsampling loses and keeps of what was answered unpruned."""
    right = {question for question, is_right in whole.items() if is_right}
    return (
        {question for question in right if not baseline.get(question, False)},
        {question for question in right if baseline.get(question, False)},
    )


def group_rows(table: Table, store: CellStore, baseline: str) -> list[str]:
    """Return a line of Markdown for each measured row, retention and benchmark."""
    lines = []
    for column in table.columns:
        read = _reader(table, store, column)
        whole = read("Ours", 1.0)
        for retention in table.retentions:
            downsampled = read(baseline, retention)
            if whole is None or downsampled is None:
                continue
            groups = parted(whole, downsampled)
            for row in table.served:
                if row == baseline or (given := read(row, retention)) is None:
                    continue
                cells = [_share(given, group) for group in groups]
                lines.append(f"| {column} | {retention:g} | {row} | {cells[0]} | {cells[1]} |")
    return lines


def _reader(table: Table, store: CellStore, column: str) -> Any:
    def read(row: str, retention: float) -> Answered | None:
        return answered(BENCHMARKS[column], store.folder(table, row, retention, column))

    return read


def _share(given: Mapping[Any, bool], group: set[Any]) -> str:
    """The share of a group that was answered, in percent, with Wilson's 95 % interval."""
    if not group:
        return "–"
    count, z = len(group), 1.96
    share = sum(given.get(question, False) for question in group) / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + (z / count / 2) ** 2)
    return f"{100 * share:.1f} [{100 * (middle - reach):.1f}, {100 * (middle + reach):.1f}]"


def main(arguments: list[str] | None = None) -> int:
    tables = {
        name: table
        for name, table in {**paper_tables(), SCENES.name: SCENES}.items()
        if "Ours" in table.served
    }
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper.parting",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("table", choices=tables, metavar="TABLE", help=", ".join(tables))
    parser.add_argument("--baseline", default="resize", help="the row that parts (default: resize)")
    parser.add_argument("--limit", type=int, metavar="N", help="of a trial with --limit N")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"default: {RESULTS}")
    options = parser.parse_args(arguments)
    table = tables[options.table]
    if options.baseline not in table.served:
        parser.error(f"--baseline must be a row of {table.name}: {', '.join(table.served)}")
    lines = group_rows(table, CellStore(options.results, options.limit), options.baseline)
    if not lines:
        print(
            f"nothing to part: measure `python -m benchmarks.paper {table.name} --row "
            f"{options.baseline}` and another row first, on benchmarks whose questions are scored "
            "one by one (GQA, SQA, VQAv2, TextVQA, VizWiz)",
            file=sys.stderr,
        )
        return 1
    print("| benchmark | retention | row | A: downsampling lost it | B: it did not |")
    print("|---|---|---|---:|---:|", *lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

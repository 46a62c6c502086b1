"""Render: result files as Markdown tables and plots, in the document that shows them."""

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.quality.plots import plot
from benchmarks.quality.results import read
from benchmarks.quality.tables import failure_table, group_table, relative_table, tables
from benchmarks.shared.markers import fill_in
from benchmarks.shared.provenance import ROOT

FIGURES = ROOT / "docs" / "figures"
_VIEWS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "relative": relative_table,
    "groups": group_table,
    "failures": failure_table,
}
"""What a document may show of a result file besides all of it, by the word in its marker."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS.json")
    parser.add_argument(
        "--document",
        type=Path,
        help="also put the tables between this file's markers, such as docs/quality.md",
    )
    parser.add_argument(
        "--figures", type=Path, default=FIGURES, help="folder of the plots (default: docs/figures)"
    )


def main(arguments: argparse.Namespace) -> None:
    """Print the tables, draw the plots, refresh the document."""
    for path in arguments.results:
        results = read(path)
        content = tables(results)
        print(content + "\n")
        document = ""
        if arguments.document is not None:
            document = arguments.document.read_text(encoding="utf-8")
        views = [v for v in _VIEWS if f"<!-- results: {path.stem} {v} -->" in document]
        for view in views:
            document = fill_in(document, f"{path.stem} {view}", _VIEWS[view](results))
        if not views:
            figures = plot(results, path.stem, arguments.figures)
            for figure in figures:
                print(f"drawn: {figure}")
            if arguments.document is not None:
                folder = arguments.document.parent
                shown = [f"![{f.stem}]({os.path.relpath(f, folder)})" for f in figures]
                parts = [f"### {results['model']['name']}", *shown, content]
                document = fill_in(document, path.stem, "\n\n".join(parts))
        if arguments.document is not None:
            arguments.document.write_text(document, encoding="utf-8")

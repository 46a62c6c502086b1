"""Render: result files as Markdown tables and plots, in the document that shows them."""

import argparse
import os
from pathlib import Path

from benchmarks.quality.plots import plot
from benchmarks.quality.results import read
from benchmarks.quality.tables import relative_table, tables
from benchmarks.shared.markers import fill_in
from benchmarks.shared.provenance import ROOT

FIGURES = ROOT / "docs" / "figures"


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
        figures = plot(results, path.stem, arguments.figures)
        content = tables(results)
        print(content + "\n")
        for figure in figures:
            print(f"drawn: {figure}")
        if arguments.document is not None:
            folder = arguments.document.parent
            shown = [f"![{figure.stem}]({os.path.relpath(figure, folder)})" for figure in figures]
            parts = [f"### {results['model']['name']}", *shown, content]
            document = arguments.document.read_text(encoding="utf-8")
            relative = f"{path.stem} relative"
            if f"<!-- results: {relative} -->" in document:
                filled = fill_in(document, relative, relative_table(results))
            else:
                filled = fill_in(document, path.stem, "\n\n".join(parts))
            arguments.document.write_text(filled, encoding="utf-8")

"""Render: result files as Markdown tables and plots, in the document that shows them."""

import argparse
import os
import re
from pathlib import Path

from benchmarks.quality.plots import plot
from benchmarks.quality.results import read
from benchmarks.quality.tables import relative_table, tables
from benchmarks.shared.provenance import ROOT

FIGURES = ROOT / "docs" / "figures"


def fill_in(document: str, name: str, content: str) -> str:
    """Return the document with `content` between the markers of `name`.

    The markers are the lines `<!-- results: NAME -->` and `<!-- end of NAME -->`; whatever stood
    between them is replaced. A document that shows relative accuracy alone has `NAME relative`.
    """
    start, end = f"<!-- results: {name} -->", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(document):
        raise ValueError(f"no place for {name}: the document needs the lines {start} and {end}")
    return pattern.sub(lambda _: f"{start}\n{content}\n{end}", document)


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

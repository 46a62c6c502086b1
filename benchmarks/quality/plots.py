"""Plots: results as pictures."""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.quality.questions import KINDS
from benchmarks.quality.results import UNPRUNED_NAME
from benchmarks.quality.tables import SPLIT_TITLES, percent

_COLORS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#8c6d31",
    "#7b4173",
    "#5a9e2f",
    "#d55e00",
    "#637939",
)
_OURS, _BASELINE = "#c1121f", "#808080"
# Text stays text, ids do not change from run to run: a figure that is made again is the same file.
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "msdg",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def plot(results: Mapping[str, Any], stem: str, folder: Path) -> list[Path]:
    """Draw the figures of a result file into a folder and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    with mpl.rc_context(_STYLE):
        for table in results["tables"]:
            if table["title"] == "Methods":
                drawn.append(_save(accuracy_figure(results, table), folder / f"{stem}.svg"))
                drawn.append(_save(kinds_figure(results, table), folder / f"{stem}-kinds.svg"))
            elif table["title"] == "Place of the saliency window":
                drawn.append(_save(window_figure(results, table), folder / f"{stem}-window.svg"))
    return drawn


def accuracy_figure(results: Mapping[str, Any], table: Mapping[str, Any]) -> Figure:
    """Accuracy and relative accuracy against retention, one line per method, a row per split."""
    splits = results["scenes"]["splits"]
    figure, grid = plt.subplots(
        len(splits), 2, figsize=(9.2, 3.1 * len(splits) + 0.5), squeeze=False, layout="constrained"
    )
    for axes, split in zip(grid, splits, strict=True):
        for axis, measure, title in (
            (axes[0], "overall", "accuracy (%)"),
            (axes[1], "relative", "relative accuracy (%)"),
        ):
            _method_lines(axis, results, table, split, lambda entry, m=measure: entry[m])
            axis.set_ylabel(title)
            axis.set_title(SPLIT_TITLES[split], fontsize=9)
            axis.set_xlabel("visual tokens kept")
    _legend(figure, grid[0][0])
    return figure


def kinds_figure(results: Mapping[str, Any], table: Mapping[str, Any]) -> Figure:
    """Accuracy against retention for each kind of question, on the first split."""
    split = results["scenes"]["splits"][0]
    figure, grid = plt.subplots(
        2, 3, figsize=(9.2, 5.4), layout="constrained", sharex=True, squeeze=False
    )
    for axis, kind in zip(grid.flat, KINDS, strict=True):
        _method_lines(axis, results, table, split, lambda entry, k=kind: entry["accuracy"][k])
        axis.set_title(kind, fontsize=9)
    for axis in grid[:, 0]:
        axis.set_ylabel("accuracy (%)")
    for axis in grid[1]:
        axis.set_xlabel("visual tokens kept")
    _legend(figure, grid[0][0])
    return figure


def window_figure(results: Mapping[str, Any], table: Mapping[str, Any]) -> Figure:
    """Relative accuracy against where the saliency window begins; dashed: the default."""
    split = results["scenes"]["splits"][0]
    entries = _entries(results, split)
    figure, axis = plt.subplots(figsize=(5.2, 3.0), layout="constrained")
    for retention, color in zip(table["retentions"], (_COLORS[0], _OURS), strict=False):
        points = []
        for label, name in table["rows"]:
            start = int(label.split("→")[0])
            points.append((start, entries[name, retention]["relative"]))
            if name == table["default"]:
                axis.axvline(start, color="#999999", linestyle="--", linewidth=1)
        _line(axis, points, color=color, label=percent(retention))
    axis.set_xlabel("first state of the window")
    axis.set_ylabel("relative accuracy (%)")
    axis.legend(title="visual tokens kept")
    return figure


def _method_lines(
    axis: Axes, results: Mapping[str, Any], table: Mapping[str, Any], split: str, measure: Any
) -> None:
    entries = _entries(results, split)
    names = [name for _, name in table["rows"]]
    others = iter(_COLORS * len(names))
    # Ours last, so that it lies on top.
    for name in sorted(names, key=lambda name: name == table["default"]):
        is_ours, is_baseline = name == table["default"], name == results["reference"]
        color = _OURS if is_ours else _BASELINE if is_baseline else next(others)
        points = [(float(Fraction(r)), measure(entries[name, r])) for r in table["retentions"]]
        points.append((1.0, measure(entries[UNPRUNED_NAME, "1"])))
        _line(
            axis,
            points,
            color=color,
            label=name,
            linewidth=2.2 if is_ours else 1.2,
            linestyle="--" if is_baseline else "-",
            bars=is_ours or is_baseline,
        )
    axis.set_xscale("log")
    ticks = [*table["retentions"], "1"]
    axis.set_xticks([float(Fraction(r)) for r in ticks], labels=ticks)
    axis.minorticks_off()


def _line(
    axis: Axes,
    points: Iterable[tuple[float, Mapping[str, float | None]]],
    *,
    bars: bool = True,
    **style: Any,
) -> None:
    """A line through estimates, with a band where their intervals are."""
    known = sorted(
        ((x, part) for x, part in points if part["value"] is not None), key=lambda p: p[0]
    )
    places = [x for x, _ in known]
    value, low, high = (
        [100 * (part[name] or 0.0) for _, part in known] for name in ("value", "low", "high")
    )
    axis.plot(places, value, marker="o", markersize=3, **style)
    if bars:
        axis.fill_between(places, low, high, color=style["color"], alpha=0.13, linewidth=0)


def _legend(figure: Figure, axis: Axes) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(
        handles[::-1], labels[::-1], loc="outside lower center", ncols=min(6, len(labels))
    )


def _entries(results: Mapping[str, Any], split: str) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {(e["name"], e["retention"]): e for e in results["entries"] if e["split"] == split}


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path

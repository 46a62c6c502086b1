"""Tables: results as Markdown, laid out as the paper's tables are."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from benchmarks.quality.results import UNPRUNED_NAME

Entry = Mapping[str, Any]
_NOTHING = "–"
# Of the table by kind of question: ours, a rival of another kind, and a smaller picture.
_FAILING = ("msdg", "divprune", "pool")
SPLIT_TITLES = {
    "test": "test scenes",
    "held_out": "held-out pairs",
    "crowded": "crowded scenes",
    "small": "small shapes",
    "fine": "fine scenes",
}


def tables(results: Mapping[str, Any]) -> str:
    """Return every table of a result file for every split."""
    splits = results["scenes"]["splits"]
    parts = [_facts(results)]
    for split in splits:
        for table in results["tables"]:
            parts.append(f"**{table['title']}, {SPLIT_TITLES[split]}**")
            parts.append(markdown_table(results, table, split))
    return "\n\n".join(parts)


def markdown_table(results: Mapping[str, Any], table: Mapping[str, Any], split: str) -> str:
    """Return one table: a block per retention, a row per method or variant.

    Accuracy in percent; relative accuracy and the difference to the reference with 95 %
    intervals. The best relative accuracy of a block is bold, as in the paper.
    """
    entries = {
        (entry["name"], entry["retention"]): entry
        for entry in results["entries"]
        if entry["split"] == split
    }
    reference = results["reference"]
    last = [f"− {reference}"] if reference else []
    kinds = entries[UNPRUNED_NAME, "1"]["accuracy"]
    heads = ["", *kinds, "overall", "RelAcc.", *last]
    lines = [_line(heads), "|---|" + "---:|" * (len(heads) - 1)]
    lines.append(_line([UNPRUNED_NAME, *_cells(entries[UNPRUNED_NAME, "1"], False, bool(last))]))
    for retention in table["retentions"]:
        block = [(label, entries[name, retention]) for label, name in table["rows"]]
        lines.append(_line([f"*{retention} ({percent(retention)})*", *[""] * (len(heads) - 1)]))
        best = _best([entry["relative"]["value"] for _, entry in block])
        for label, entry in block:
            is_best = entry["relative"]["value"] is not None and (
                _tenths(entry["relative"]["value"]) == best
            )
            shown = f"**{label}**" if entry["name"] == table["default"] else label
            lines.append(_line([shown, *_cells(entry, is_best, bool(last))]))
    if table["with_mean"]:
        lines += _mean_block(entries, table, len(heads), bool(last))
    return "\n".join(lines)


def relative_table(results: Mapping[str, Any]) -> str:
    """Return relative accuracy alone: a row per method, a column per retention, first split."""
    table, split = results["tables"][0], results["scenes"]["splits"][0]
    relative = {
        (entry["name"], entry["retention"]): entry["relative"]
        for entry in results["entries"]
        if entry["split"] == split
    }
    names = [name for _, name in table["rows"]]
    best = {r: _best([relative[n, r]["value"] for n in names]) for r in table["retentions"]}
    lines = [_line(["", *table["retentions"]]), "|---|" + "---:|" * len(table["retentions"])]
    for label, name in table["rows"]:
        cells = [f"**{label}**" if name == table["default"] else label]
        for retention in table["retentions"]:
            part = relative[name, retention]
            shown = _with_interval(part)
            is_best = part["value"] is not None and _tenths(part["value"]) == best[retention]
            cells.append(f"**{shown}**" if is_best else shown)
        lines.append(_line(cells))
    return "\n".join([_facts(results), "", *lines])


def group_table(results: Mapping[str, Any]) -> str:
    """Return accuracy on what downsampling loses (A) and keeps (B): a row per method."""
    groups = results["groups"]
    entries = {(e["name"], e["retention"]): e for e in groups["entries"]}
    retentions = results["tables"][0]["retentions"]
    heads = [""]
    for retention in retentions:
        any_entry = next(e for (_, r), e in entries.items() if r == retention)
        heads += [f"{retention}: {g} ({any_entry[g]['questions']})" for g in ("A", "B")]
    lines = [_line(heads), "|---|" + "---:|" * (len(heads) - 1)]
    for label, name in results["tables"][0]["rows"]:
        if name == groups["baseline"]:
            continue
        cells = [f"**{label}**" if name == results["tables"][0]["default"] else label]
        for retention in retentions:
            cells += [_with_interval(entries[name, retention][group]) for group in ("A", "B")]
        lines.append(_line(cells))
    return "\n".join([_facts(results), "", *lines])


def failure_table(results: Mapping[str, Any], names: Sequence[str] = _FAILING) -> str:
    """Return accuracy by scenes and kind of question, unpruned and at each budget."""
    entries = {(e["split"], e["name"], e["retention"]): e for e in results["entries"]}
    retentions = results["tables"][0]["retentions"]
    settings = [(name, retention) for retention in retentions for name in names]
    heads = ["scenes", "question", "unpruned", *(f"{name} {r}" for name, r in settings)]
    lines = [_line(heads), "|---|---|" + "---:|" * (len(heads) - 2)]
    for split in results["scenes"]["splits"]:
        for kind in entries[split, UNPRUNED_NAME, "1"]["accuracy"]:
            parts = [
                entries[split, name, retention]["accuracy"][kind]["value"]
                for name, retention in [(UNPRUNED_NAME, "1"), *settings]
            ]
            if parts[0] is not None:
                shown = [_NOTHING if part is None else f"{100 * part:.0f}" for part in parts]
                lines.append(_line([SPLIT_TITLES[split], kind, *shown]))
    return "\n".join([_facts(results), "", *lines])


def percent(retention: str) -> str:
    return f"{float(100 * Fraction(retention)):.1f} %"


def _facts(results: Mapping[str, Any]) -> str:
    model, scenes = results["model"], results["scenes"]
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    number, seeds = scenes["seeds"] * scenes["per_seed"], _count(scenes["seeds"], "seed")
    return (
        f"`{results['command']}`, {results['date']}, commit `{results['commit'][:12]}"
        f"{'-dirty' if results['commit'].endswith('-dirty') else ''}`, weights of {model['name']} "
        f"`{model['weights_sha256'][:12]}`, {number} scenes a split ({seeds}), "
        f"{results['processor']}; {versions}."
    )


def _mean_block(
    entries: Mapping[tuple[str, str], Entry],
    table: Mapping[str, Any],
    width: int,
    has_difference: bool,
) -> list[str]:
    """The mean relative accuracy over the retentions, the paper's last column."""
    lines = [_line(["*mean of the retentions*", *[""] * (width - 1)])]
    means = {}
    for _, name in table["rows"]:
        values = [entries[name, r]["relative"]["value"] for r in table["retentions"]]
        means[name] = None if None in values else sum(values) / len(values)
    best = _best(list(means.values()))
    for label, name in table["rows"]:
        mean = means[name]
        text = _NOTHING if mean is None else f"{100 * mean:.1f}"
        if mean is not None and _tenths(mean) == best:
            text = f"**{text}**"
        shown = f"**{label}**" if name == table["default"] else label
        blank = [""] * (width - 2 - has_difference)
        lines.append(_line([shown, *blank, text, *([""] if has_difference else [])]))
    return lines


def _cells(entry: Entry, is_best: bool, has_difference: bool) -> list[str]:
    numbers = [part["value"] for part in entry["accuracy"].values()]
    numbers.append(entry["overall"]["value"])
    cells = [_NOTHING if number is None else f"{100 * number:.1f}" for number in numbers]
    relative = _with_interval(entry["relative"])
    cells.append(f"**{relative}**" if is_best else relative)
    if has_difference:
        cells.append(_with_interval(entry["difference"], "+"))
    return cells


def _with_interval(part: Mapping[str, float | None] | None, sign: str = "") -> str:
    if part is None:
        return ""
    if part["value"] is None:
        return _NOTHING
    value, low, high = (100 * (part[name] or 0.0) for name in ("value", "low", "high"))
    return f"{value:{sign}.1f} [{low:{sign}.1f}, {high:{sign}.1f}]"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _best(values: list[float | None]) -> float | None:
    known = [_tenths(value) for value in values if value is not None]
    return max(known, default=None)


def _tenths(value: float) -> float:
    """The precision that is shown: what looks equal is equally good."""
    return round(100 * value, 1)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"

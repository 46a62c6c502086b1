"""What follows from questions about pictures that repeat, on made-up measurements."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.serving import repeats
from benchmarks.serving.repeats import (
    FIRST,
    ONE,
    RETENTIONS,
    SECOND,
    TEXT,
    ZIPF,
    Asked,
    Crowd,
    Repeats,
    summary,
)
from benchmarks.serving.samples import PRUNING, STOCK
from benchmarks.shared.provenance import provenance

SOURCE = {
    "command": "python -m benchmarks.serving repeats",
    **provenance(),
    "model": "a model",
    "rounds": 3,
    "requests": 24,
    "concurrency": 8,
}
TEXT_SECONDS = {1.0: 2.0, 0.333: 0.6, 0.111: 0.25}


def made_up(second: float = 1.04, encoded: int = 0) -> Repeats:
    """A run whose second questions take `second` times as long as a text."""
    asked, crowds = [], []
    for number in (1, 2, 3):
        slow = 1 + number / 10
        asked += [
            Asked(number, STOCK, FIRST, 1.0, 2.4 * slow, 600, 0.5, 0),
            Asked(number, STOCK, SECOND, 1.0, 0.5 * slow, 600, 0.0, 0),
        ]
        for retention, seconds in TEXT_SECONDS.items():
            ours = second * seconds * slow
            asked += [
                Asked(number, PRUNING, FIRST, retention, (0.6 + seconds) * slow, 90, 0.6, 1),
                Asked(number, PRUNING, SECOND, retention, ours, 90, 0.003, encoded),
                Asked(number, STOCK, TEXT, retention, seconds * slow, 90, 0.0, 0),
            ]
        for load in (ONE, ZIPF):
            crowds.append(Crowd(number, STOCK, load, 1.0, 24, 24 / 0.5, 0))
            crowds += [Crowd(number, PRUNING, load, r, 24, 24 / 2, 7) for r in RETENTIONS]
    return Repeats(SOURCE, asked, crowds, [0.0] * 3)


def test_a_slow_minute_cancels_out() -> None:
    over = made_up(1.04).against_limit(0.111)
    assert over.median == over.low == pytest.approx(1.04)


def test_what_a_picture_costs_before_it_is_known_is_counted_apart() -> None:
    results = made_up(1.0)
    with_picture = replace(results, picture_seconds=[0.025] * 3)
    assert with_picture.against_limit(0.111).median < results.against_limit(0.111).median


def test_the_goals_notice_a_late_answer_and_an_encoder_run() -> None:
    assert "**no**" not in summary(made_up())
    assert summary(made_up(second=1.2)).count("**no**") == 2
    assert summary(made_up(encoded=1)).count("**no**") == 2


def test_the_tables_have_a_row_for_each_case() -> None:
    text = summary(made_up())
    for name in ("stock vLLM", "retention 1 ", "retention 0.333", "retention 0.111"):
        assert text.count(f"| {name}") == 2, name
    assert "21 of 72" in text


def test_a_run_survives_its_file_and_fills_its_place_in_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, path, page = made_up(), tmp_path / "repeats.json", tmp_path / "page.md"
    results.save(path)
    assert Repeats.load(path) == results
    page.write_text("before\n<!-- results: repeats -->\n<!-- end of repeats -->\nbehind\n")
    monkeypatch.setattr(repeats, "PAGE", page)
    repeats.render(path)
    assert summary(results) in page.read_text()

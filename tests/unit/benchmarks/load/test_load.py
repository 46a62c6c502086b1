"""The report of a load run."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.load.__main__ import FOLDER, main
from benchmarks.load.html_report import rows_of, text_table
from benchmarks.shared.provenance import provenance


def answer(retention: float | None, turn: int, ttft: float, **fields: Any) -> dict[str, Any]:
    return {
        "retention": retention,
        "turn": turn,
        "ttft": ttft,
        "latency": ttft + 0.1,
        "tpot": 0.01,
        "prompt_tokens": 100 * turn,
        "visual_tokens": 16,
        **fields,
    }


ANSWERS = [
    *(answer(0.111, 1, n / 100) for n in range(1, 21)),
    answer(0.111, 2, 0.005),
    answer(1.0, 1, 0.3, visual_tokens=144, tpot=None),
    answer(None, 1, 0.4, visual_tokens=None),
]


def test_rows_are_by_retention_with_first_and_later_turns_apart() -> None:
    rows = rows_of(ANSWERS)
    assert [row.name for row in rows] == ["no retention sent", "retention 1", "retention 0.111"]
    last = rows[-1]
    assert (last.num_answers, last.prompt_tokens, last.visual_tokens) == (21, 100, 16)
    assert (len(last.first_ttft), last.later_ttft) == (20, [0.005])


def test_a_table_shows_percentiles_and_dashes_for_what_is_unknown() -> None:
    lines = text_table(rows_of(ANSWERS)).splitlines()
    assert lines[3].split()[:8] == ["retention", "0.111", "21", "16", "100", "100", "ms", "190"]
    assert lines[1].split()[:6] == ["no", "retention", "sent", "1", "-", "100"]
    assert len(set(map(len, lines))) == 1


def test_the_report_is_one_page_with_table_plots_and_source(tmp_path: Path) -> None:
    source = {"command": "python -m a <b>", "endpoint": "some endpoint", **provenance()}
    (tmp_path / "answers.json").write_text(json.dumps(ANSWERS))
    (tmp_path / "source.json").write_text(json.dumps(source))
    assert main(["report", "--folder", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 1
    assert "<td>retention 0.111</td><td>21</td>" in page
    assert "python -m a &lt;b&gt;" in page
    assert provenance()["commit"] in page
    assert "src=" not in page, "nothing is loaded from elsewhere"


def test_nothing_to_report_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "answers.json").write_text("[]")
    assert main(["report", "--folder", str(tmp_path)]) == 1
    assert "nothing to report" in capsys.readouterr().err
    assert main(["report", "--folder", str(tmp_path / "nowhere")]) == 1


def test_runs_are_not_under_version_control() -> None:
    assert FOLDER.parent.name == "runs"
    assert "runs/" in (FOLDER.parents[2] / ".gitignore").read_text().splitlines()

"""Questions are parted by what downsampling still answers."""

import json
from pathlib import Path

import pytest

from benchmarks.paper.cells import CellStore
from benchmarks.paper.columns import BENCHMARKS
from benchmarks.paper.parting import answered, group_rows, main, parted
from benchmarks.paper.published import paper_tables

TABLE = paper_tables()["qwen25vl"]
# Of eight questions: unpruned answers all but one, downsampling half, ours six.
SCORES = {
    ("Ours", 1.0): [1, 1, 1, 1, 1, 1, 1, 0],
    ("resize", TABLE.retentions[0]): [1, 1, 1, 1, 0, 0, 0, 0],
    ("Ours", TABLE.retentions[0]): [1, 1, 1, 0, 1, 1, 0, 1],
}


def write(store: CellStore, row: str, retention: float, scores: list[float]) -> None:
    folder = store.folder(TABLE, row, retention, "GQA") / "20260101T000000" / "model"
    folder.mkdir(parents=True)
    lines = [json.dumps({"doc_id": n, "exact_match": score}) for n, score in enumerate(scores)]
    (folder / "20260101_samples_gqa.jsonl").write_text("\n".join(lines), encoding="utf-8")


@pytest.fixture
def store(tmp_path: Path) -> CellStore:
    store = CellStore(tmp_path)
    for (row, retention), scores in SCORES.items():
        write(store, row, retention, [float(score) for score in scores])
    return store


def test_what_nobody_answered_belongs_to_no_group(store: CellStore) -> None:
    whole, downsampled = (
        answered(BENCHMARKS["GQA"], store.folder(TABLE, row, retention, "GQA"))
        for row, retention in list(SCORES)[:2]
    )
    assert whole is not None
    assert downsampled is not None
    lost, kept = parted(whole, downsampled)
    assert {number for _, number in lost} == {4, 5, 6}
    assert {number for _, number in kept} == {0, 1, 2, 3}


def test_a_row_is_scored_on_both_groups(store: CellStore) -> None:
    (line,) = group_rows(TABLE, store, "resize")
    assert line.startswith(f"| GQA | {TABLE.retentions[0]:g} | Ours | 66.7 [20.8, 93.9] | 75.0 [")


def test_scores_that_are_no_numbers_cannot_be_parted(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "model"
    folder.mkdir(parents=True)
    sample = {"doc_id": 0, "exact_match": {"question": 1}}
    (folder / "x_samples_gqa.jsonl").write_text(json.dumps(sample), encoding="utf-8")
    assert answered(BENCHMARKS["GQA"], tmp_path) is None
    assert answered(BENCHMARKS["GQA"], tmp_path / "nowhere") is None


def test_without_cells_it_is_said_what_to_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], store: CellStore
) -> None:
    assert main(["qwen25vl", "--results", str(tmp_path / "empty")]) == 1
    assert "--row resize" in capsys.readouterr().err
    assert main(["qwen25vl", "--results", str(store.root)]) == 0
    assert "| GQA |" in capsys.readouterr().out

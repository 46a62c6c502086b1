"""The report keeps measured numbers and the paper's apart."""

from pathlib import Path

from benchmarks.paper.cells import Cell, CellStore
from benchmarks.paper.published import Table, paper_tables
from benchmarks.paper.report import render

TABLES = paper_tables()


def cell(score: float, **more: dict[str, float]) -> Cell:
    return Cell(score=score, num_questions=10, prompt_tokens=100.0, results={}, **more)


def write(store: CellStore, table: Table, row: str, retention: float, scores: list[float]) -> None:
    for column, score in zip(table.columns, scores, strict=False):
        store.write(cell(score), table, row, retention, column)


def lines_of(text: str, start: str) -> list[list[str]]:
    """The cells of the line that starts so, and of the one after it."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(start))
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[first : first + 2]]


def test_measured_and_paper_stand_in_lines_of_their_own(tmp_path: Path) -> None:
    table, store = TABLES["qwen-window"], CellStore(tmp_path)
    write(store, table, "0->5", 1.0, [60.0, 2000.0, 80.0, 90.0])
    write(store, table, "0->5", 0.222, [30.0, 2000.0, 80.0, 90.0])
    measured, paper = lines_of(render(table, store), "| 0->5 | 0.222")
    assert measured[2:8] == ["measured", "30.0", "2000", "80.0", "90.0", "87.5"]
    assert paper[2:8] == ["paper", "57.2", "2269", "84.0", "87.3", "96.9"]


def test_relacc_is_relative_to_what_was_measured_unpruned(tmp_path: Path) -> None:
    table, store = TABLES["qwen-window"], CellStore(tmp_path)
    write(store, table, "0->5", 0.222, [57.2, 2269, 84.0, 87.3])
    measured, _ = lines_of(render(table, store), "| 0->5 | 0.222")
    assert measured[7] == "–"


def test_a_relacc_over_some_columns_says_so(tmp_path: Path) -> None:
    table, store = TABLES["qwen-window"], CellStore(tmp_path)
    for retention in (1.0, 0.222):
        write(store, table, "0->5", retention, [60.0, 2000.0])
    measured, paper = lines_of(render(table, store), "| 0->5 | 0.222")
    assert measured[3:8] == ["60.0", "2000", "–", "–", "100.0 (2 of 4)"]
    assert paper[7] == "96.9"


def test_rows_that_were_not_measured_are_left_out(tmp_path: Path) -> None:
    table, store = TABLES["llava15"], CellStore(tmp_path)
    write(store, table, "Ours", 0.333, [60.0])
    text = render(table, store)
    assert "| Ours | 0.333 |" in text
    assert "| Ours | 0.222 |" not in text
    assert "VisionZip" not in text


def test_a_trial_says_that_it_cannot_be_compared(tmp_path: Path) -> None:
    assert "first 8 questions" in render(TABLES["llava15"], CellStore(tmp_path, limit=8))
    assert "cannot be compared" not in render(TABLES["llava15"], CellStore(tmp_path))


def test_latencies_stand_beside_the_papers(tmp_path: Path) -> None:
    table, store = TABLES["efficiency"], CellStore(tmp_path)
    times = {"inference": 50.25, "prefill": 20.0}
    store.write(cell(87.0, milliseconds=times), table, "Ours", 0.056, "POPE")
    measured, paper = lines_of(render(table, store), "| Ours | 0.056")
    assert measured[-2:] == ["50.2", "20.0"]
    assert paper[-2:] == ["96.0", "27.8"]


def test_a_gap_in_the_paper_stays_a_gap(tmp_path: Path) -> None:
    table, store = TABLES["llava15"], CellStore(tmp_path)
    write(store, table, "HiPrune", 0.333, [60.0])
    _, paper = lines_of(render(table, store), "| HiPrune | 0.333")
    assert paper[3 + table.columns.index("SEED-I")] == "–"

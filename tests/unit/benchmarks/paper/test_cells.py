"""A measured cell is found again by what it measured, and by nothing else."""

import json
from pathlib import Path

from benchmarks.paper.cells import Cell, CellStore
from benchmarks.paper.published import paper_tables

TABLES = paper_tables()
CELL = Cell(
    score=61.5,
    num_questions=9,
    prompt_tokens=120.5,
    results={"gqa": {"exact_match,none": 0.615}},
    milliseconds={"prefill": 3.5},
    made_by={"lmms_eval": "0.7.3"},
)


def test_a_cell_reads_back_unchanged(tmp_path: Path) -> None:
    store = CellStore(tmp_path)
    store.write(CELL, TABLES["llava15"], "Ours", 0.333, "GQA")
    assert store.read(TABLES["llava15"], "Ours", 0.333, "GQA") == CELL


def test_other_cells_stay_empty(tmp_path: Path) -> None:
    store = CellStore(tmp_path)
    store.write(CELL, TABLES["llava15"], "Ours", 0.333, "GQA")
    assert store.read(TABLES["llava15"], "Ours", 0.222, "GQA") is None
    assert store.read(TABLES["llava15"], "Ours", 0.333, "MME") is None
    assert store.read(TABLES["llava15"], "VisionZip", 0.333, "GQA") is None
    assert store.read(TABLES["llava15-13b"], "Ours", 0.333, "GQA") is None
    assert CellStore(tmp_path, limit=10).read(TABLES["llava15"], "Ours", 0.333, "GQA") is None


def test_the_unpruned_model_is_shared_by_all_rows(tmp_path: Path) -> None:
    store = CellStore(tmp_path)
    store.write(CELL, TABLES["qwen25vl"], "Ours", 1.0, "GQA")
    assert store.read(TABLES["qwen25vl"], "VisionZip", 1.0, "GQA") == CELL
    assert store.read(TABLES["qwen-window"], "0->5", 1.0, "GQA") == CELL


def test_tables_share_a_setting_however_they_name_it(tmp_path: Path) -> None:
    store = CellStore(tmp_path)
    store.write(CELL, TABLES["qwen25vl"], "Ours", 0.222, "GQA")
    assert store.read(TABLES["qwen-window"], "19->24", 0.222, "GQA") == CELL
    assert store.read(TABLES["groups"], "K=20", 0.222, "GQA") == CELL
    assert store.read(TABLES["groups"], "K=16", 0.222, "GQA") is None


def test_latency_never_comes_from_requests_that_had_company(tmp_path: Path) -> None:
    store = CellStore(tmp_path)
    store.write(CELL, TABLES["llava-next"], "Ours", 0.056, "POPE")
    assert store.read(TABLES["efficiency"], "Ours", 0.056, "POPE") is None


def test_no_two_settings_share_a_folder(tmp_path: Path) -> None:
    store = CellStore(tmp_path)
    by_folder: dict[Path, set[str]] = {}
    for table in TABLES.values():
        for row, setting in table.served.items():
            how = json.dumps([table.model, setting.method, str(table.profile_of(row))])
            folder = store.folder(table, row, 0.222, "GQA-")
            if not table.times_requests:
                by_folder.setdefault(folder, set()).add(how)
    assert all(len(settings) == 1 for settings in by_folder.values())

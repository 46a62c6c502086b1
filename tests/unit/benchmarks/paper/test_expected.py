"""The paper's numbers agree with each other, and with what its text says."""

import pytest

from benchmarks.paper.columns import BENCHMARKS
from benchmarks.paper.published import (
    RIVALS_AT_ANY_SIZE,
    Table,
    paper_tables,
    relative_accuracy,
)
from msdg_vllm.core import num_kept_tokens

TABLES = paper_tables()


@pytest.fixture(params=TABLES.values(), ids=list(TABLES))
def table(request: pytest.FixtureRequest) -> Table:
    value: Table = request.param
    return value


def test_every_relacc_follows_from_the_scores_beside_it(table: Table) -> None:
    # The paper rounds scores to one digit before printing, so its RelAcc may be off in the last.
    wrong = [
        (row.name, row.retention, derived, row.relacc)
        for row in table.rows
        if row.relacc is not None
        for derived in [relative_accuracy(row.scores, table.unpruned)]
        if derived is None or abs(derived - row.relacc) > 0.08
    ]
    assert wrong == []


def test_every_row_has_a_score_or_a_gap_for_every_column(table: Table) -> None:
    assert len(table.unpruned) == len(table.columns)
    assert {len(row.scores) for row in table.rows} == {len(table.columns)}
    assert len({(row.name, row.retention) for row in table.rows}) == len(table.rows)


def test_every_column_can_be_measured(table: Table) -> None:
    assert set(table.columns) <= BENCHMARKS.keys()


def test_every_served_row_is_in_the_paper_or_newer_and_has_a_valid_profile(table: Table) -> None:
    newer = {*RIVALS_AT_ANY_SIZE} if "Ours" in table.served else set()
    assert table.served.keys() <= {row.name for row in table.rows} | newer
    for row in table.served:
        assert table.profile_of(row) is not None


@pytest.mark.parametrize(
    ("name", "relacc"),
    [
        ("llava15", [98.5, 97.6, 95.4]),
        ("llava-next", [97.5, 95.1, 91.9]),
        ("mini-gemini", [98.8, 98.0, 95.2]),
        ("qwen25vl", [97.2, 96.1, 92.4]),
        ("llava15-13b", [98.3, 97.4, 96.3]),
        ("qwen25vl-32b", [96.6, 94.7, 89.8]),
    ],
)
def test_our_relacc_is_what_the_text_of_the_paper_says(name: str, relacc: list[float]) -> None:
    rows = [TABLES[name].paper_row("Ours", retention) for retention in TABLES[name].retentions]
    assert [row.relacc for row in rows if row] == relacc


@pytest.mark.parametrize(
    ("name", "tiles", "budgets"),
    [
        ("llava15", 1, [192, 128, 64]),
        ("llava15-13b", 1, [192, 128, 64]),
        ("llava-next", 5, [640, 320, 160]),
        ("llava-next-13b", 5, [640, 320, 160]),
        ("efficiency", 5, [160]),
    ],
)
def test_a_retention_keeps_as_many_tokens_as_the_text_says(
    name: str, tiles: int, budgets: list[int]
) -> None:
    kept = [tiles * num_kept_tokens(576, retention) for retention in TABLES[name].retentions]
    assert kept == budgets


def test_the_same_row_reads_the_same_in_every_table_of_a_model() -> None:
    seen: dict[tuple[str, str, float, str], set[float | None]] = {}
    for table in TABLES.values():
        for row in table.rows:
            for column, score in zip(table.columns, row.scores, strict=True):
                seen.setdefault((table.model, row.name, row.retention, column), set()).add(score)
    assert [cell for cell, scores in seen.items() if len(scores) > 1] == []


def test_relacc_leaves_out_what_is_missing() -> None:
    assert relative_accuracy([50.0, None, 30.0], [100.0, 80.0, None]) == 50.0
    assert relative_accuracy([None], [100.0]) is None

"""What a method answers that downsampling does not."""

import pytest

from benchmarks.quality.cases import UNPRUNED, scene_ids
from benchmarks.quality.groups import grouped, usable_kinds
from benchmarks.quality.questions import KINDS
from benchmarks.quality.results import UNPRUNED_NAME, Mark, Table, report
from benchmarks.quality.scenes import MAX_ITEMS, sample_scene
from benchmarks.quality.tables import failure_table, group_table
from tests.unit.benchmarks.quality.facts import FACTS, NINTH


def marks() -> list[Mark]:
    """Unpruned cannot count; pooling answers even scenes; divprune the others; msdg all."""
    right = {
        (UNPRUNED_NAME, UNPRUNED): lambda number: True,
        ("pool", NINTH): lambda number: number % 2 == 0,
        ("divprune", NINTH): lambda number: number % 2 == 1,
        ("msdg", NINTH): lambda number: True,
    }
    return [
        Mark(scene, kind, name, retention, kind != "counting" and is_right(scene.number))
        for scene in scene_ids(["test"], 1, 10)
        for kind in KINDS
        for (name, retention), is_right in right.items()
    ]


def results() -> dict:
    names = ("msdg", "divprune", "pool")
    table = Table("Methods", tuple((name, name) for name in names), "msdg", (NINTH,))
    made = report(FACTS, marks(), [table], None)
    usable = usable_kinds(made["entries"])
    made["groups"] = {
        "baseline": "pool",
        "entries": grouped(marks(), "pool", ["test"], usable),
    }
    return made


def test_questions_are_parted_by_what_downsampling_answers():
    entries = {entry["name"]: entry for entry in results()["groups"]["entries"]}
    assert entries.keys() == {"msdg", "divprune"}
    for entry in entries.values():
        assert entry["A"]["questions"] == entry["B"]["questions"] == 5 * (len(KINDS) - 1)
    assert entries["msdg"]["A"]["value"] == entries["msdg"]["B"]["value"] == 1.0
    assert entries["divprune"]["A"]["value"] == 1.0
    assert entries["divprune"]["B"]["value"] == 0.0


def test_kinds_that_the_unpruned_model_does_not_answer_count_in_no_group():
    assert usable_kinds(results()["entries"]) == {"test": set(KINDS) - {"counting"}}


def test_groups_and_failures_become_tables():
    lines = group_table(results()).splitlines()
    assert "1/9: A (25)" in lines[2]
    assert lines[4].startswith("| **msdg** | 100.0 [100.0, 100.0] |")
    assert not any(line.startswith("| pool") for line in lines)
    lines = failure_table(results()).splitlines()
    assert lines[4] == "| test scenes | presence | 100 | 100 | 50 | 50 |"


@pytest.mark.parametrize("split", ["crowded", "small"])
def test_hard_scenes_share_no_seed_and_are_harder(split):
    scenes = [sample_scene(number, split) for number in range(30)]
    assert [sample_scene(number, split) for number in range(30)] == scenes
    others = {sample_scene(number, "test").seed for number in range(30)}
    assert others.isdisjoint(scene.seed for scene in scenes)
    shapes = [item for scene in scenes for item in scene.shapes]
    if split == "crowded":
        assert min(len(scene.items) for scene in scenes) > MAX_ITEMS
    else:
        assert max(item.width for item in shapes) < 11 / 96

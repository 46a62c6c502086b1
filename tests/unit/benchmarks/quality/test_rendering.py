"""Results become the tables and plots that documents show."""

import argparse

from benchmarks.quality.cases import UNPRUNED, scene_ids
from benchmarks.quality.plots import plot
from benchmarks.quality.questions import KINDS
from benchmarks.quality.render import main
from benchmarks.quality.results import UNPRUNED_NAME, Mark, Table, read, report, write
from benchmarks.quality.tables import markdown_table, tables
from tests.unit.benchmarks.quality.facts import FACTS, NINTH


def _results(title="Methods", rows=(("random", "random"), ("msdg", "msdg")), with_mean=False):
    """Of ten scenes the unpruned model and msdg answer all, random every second one."""
    marks = []
    for scene in scene_ids(["test"], 1, 10):
        for kind in KINDS:
            marks.append(Mark(scene, kind, UNPRUNED_NAME, UNPRUNED, True))
            for _, name in rows:
                right = name != "random" or scene.number % 2 == 0
                marks.append(Mark(scene, kind, name, NINTH, right))
    table = Table(title, tuple(rows), "msdg", (NINTH,), with_mean)
    return report(FACTS, marks, [table], "random")


def test_an_entry_has_what_was_right_of_each_kind():
    entries = {entry["name"]: entry for entry in _results()["entries"]}
    assert entries["random"]["accuracy"]["reading"]["value"] == 0.5
    assert entries["random"]["relative"]["value"] == 0.5
    assert entries["random"]["questions"] == 60
    assert entries["msdg"]["relative"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert entries["msdg"]["difference"]["value"] == 0.5
    assert entries["random"]["difference"] is None


def test_results_survive_the_file(tmp_path):
    write(_results(), tmp_path / "new" / "results.json")
    assert read(tmp_path / "new" / "results.json")["entries"] == _results()["entries"]


def test_a_table_has_a_block_per_retention_and_marks_the_best():
    results = _results()
    lines = markdown_table(results, results["tables"][0], "test").split("\n")
    assert lines[0].startswith("|  | presence | attribute |")
    assert lines[2].startswith("| unpruned | 100.0 |")
    assert lines[3].startswith("| *1/9 (11.1 %)* |")
    assert lines[4].startswith("| random | 50.0 |")
    assert lines[5].startswith("| **msdg** | 100.0 |")
    assert "**100.0 [100.0, 100.0]** | +50.0 [+" in lines[5]
    assert len({line.count("|") for line in lines}) == 1


def test_a_table_with_a_mean_ends_in_it():
    results = _results(with_mean=True)
    lines = markdown_table(results, results["tables"][0], "test").split("\n")
    assert lines[-3].startswith("| *mean of the retentions* |")
    assert "| 50.0 |" in lines[-2]
    assert "| **100.0** |" in lines[-1]


def test_tables_say_where_their_numbers_come_from():
    text = tables(_results())
    for fact in ("python -m benchmarks.quality run", "0123456789ab", "ffffffffffff", "10 scenes"):
        assert fact in text


def test_methods_and_windows_are_plotted_the_same_every_time(tmp_path):
    drawn = [plot(_results(), "quality", tmp_path / name) for name in ("one", "two")]
    assert [path.name for path in drawn[0]] == ["quality.svg", "quality-kinds.svg"]
    for first, second in zip(*drawn, strict=True):
        assert first.read_bytes() == second.read_bytes()
    assert ">msdg<" in drawn[0][0].read_text()
    rows = (("0 → 3", "0 → 3"), ("8 → 11 (ours)", "msdg"))
    windows = _results("Place of the saliency window", rows)
    assert [path.name for path in plot(windows, "ablations", tmp_path)] == ["ablations-window.svg"]


def test_one_command_refreshes_the_document_and_its_figures(tmp_path):
    write(_results(), tmp_path / "quality-a.json")
    document = tmp_path / "docs" / "quality.md"
    document.parent.mkdir()
    document.write_text("<!-- results: quality-a -->\n<!-- end of quality-a -->\n")
    arguments = argparse.Namespace(
        results=[tmp_path / "quality-a.json"],
        document=document,
        figures=document.parent / "figures",
    )
    main(arguments)
    text = document.read_text()
    assert "### a-model" in text
    assert "![quality-a](figures/quality-a.svg)" in text
    assert (document.parent / "figures" / "quality-a.svg").exists()
    main(arguments)
    assert document.read_text() == text


def test_a_document_may_show_relative_accuracy_alone(tmp_path):
    results = tmp_path / "quality-a-model.json"
    write(_results(), results)
    document = tmp_path / "methods.md"
    name = "quality-a-model relative"
    document.write_text(f"<!-- results: {name} -->\n<!-- end of {name} -->\n")
    main(argparse.Namespace(results=[results], document=document, figures=tmp_path))
    lines = document.read_text().splitlines()
    assert "| **msdg** | **100.0 [100.0, 100.0]** |" in lines
    (random,) = (line for line in lines if line.startswith("| random"))
    assert "50.0 [" in random
    assert "presence" not in document.read_text()

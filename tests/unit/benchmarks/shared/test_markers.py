"""Only what stands between the markers of a document is replaced."""

import pytest

from benchmarks.shared.markers import fill_in


def test_a_document_gets_its_tables_between_its_markers() -> None:
    document = "a\n<!-- results: x -->\nold\n<!-- end of x -->\nb\n"
    filled = fill_in(document, "x", r"new \1")
    assert filled == "a\n<!-- results: x -->\nnew \\1\n<!-- end of x -->\nb\n"
    assert fill_in(filled, "x", r"new \1") == filled
    assert fill_in(filled, "x", "newer").count("new") == 1


def test_a_document_without_markers_says_which_are_missing() -> None:
    with pytest.raises(ValueError, match=r"<!-- results: x --> and <!-- end of x -->"):
        fill_in("nothing", "x", "new")

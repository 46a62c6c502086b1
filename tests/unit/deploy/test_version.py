"""One place decides on the version; the files that repeat it say the same."""

from __future__ import annotations

from deploy.version import ROOT, outdated


def test_every_file_has_the_version_of_the_package() -> None:
    assert [path for path, _ in outdated()] == []


def test_a_new_version_goes_into_every_file_that_repeats_it() -> None:
    files = {str(path.relative_to(ROOT)): text for path, text in outdated("9.8.7rc1")}
    assert set(files) == {
        "CITATION.cff",
        "Dockerfile",
        "deploy/kubernetes/Chart.yaml",
        "docs/server.md",
    }
    assert {name: text.count("9.8.7rc1") for name, text in files.items()} == {
        "CITATION.cff": 1,
        "Dockerfile": 2,
        "deploy/kubernetes/Chart.yaml": 2,
        "docs/server.md": 1,
    }

"""What a build may copy, and that it is enough."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from deploy.context import context_files
from deploy.dockerfile import ROOT, read_stages
from deploy.prove_image import Image, ProofError, _copy, _needed_stages


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ("", ["a.txt", "b/c.py", "b/d/c.py"]),
        ("*", []),
        ("*\n!b", ["b/c.py", "b/d/c.py"]),
        ("*\n!b\n**/d", ["b/c.py"]),
        ("# none\n\n**/c.py", ["a.txt"]),
        ("b/*.py", ["a.txt", "b/d/c.py"]),
        ("?.txt", ["b/c.py", "b/d/c.py"]),
    ],
)
def test_the_last_rule_that_names_a_file_or_its_folder_decides(
    tmp_path: Path, rules: str, kept: list[str]
) -> None:
    for name in ("a.txt", "b/c.py", "b/d/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".dockerignore").write_text(rules)
    files = [str(name) for name in context_files(tmp_path)]
    assert [name for name in files if name != ".dockerignore"] == kept


def test_the_context_is_the_product_and_nothing_else() -> None:
    files = [str(name) for name in context_files(ROOT)]
    tops = {name.split("/")[0] for name in files}
    assert tops == {
        *("LICENSE", "README.md", "pyproject.toml"),
        *("models", "msdg_vllm", "scripts", "server"),
    }
    listing = subprocess.run(
        ["git", "ls-files", "msdg_vllm", "server", "models"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    assert set(listing.stdout.split()) <= set(files)


def test_every_copy_finds_its_files(tmp_path: Path) -> None:
    for stage in read_stages().values():
        image = Image(tmp_path / stage.name, workdir="/opt/msdg-vllm")
        for step in stage.all("COPY"):
            if "from" not in step.flags:
                _copy(step, image, {})
    copied = tmp_path / "cpu" / "opt" / "msdg-vllm"
    assert (copied / "server" / "__main__.py").is_file()
    assert (copied / "models" / "scenes-llava" / "config.json").is_file()
    environment = tmp_path / "cpu-environment" / "opt" / "msdg-vllm"
    assert (environment / "pyproject.toml").is_file()
    assert (environment / "scripts" / "msdg-vllm-torch-companions.pth").is_file()
    assert [path.name for path in (environment / "msdg_vllm").iterdir()] == ["__init__.py"]


def test_a_copy_of_nothing_is_an_error(tmp_path: Path) -> None:
    step = read_stages()["cpu"].all("COPY")[-1]
    missing = type(step)("COPY", {}, "tests tests")
    with pytest.raises(ProofError, match=r"\.dockerignore hides it"):
        _copy(missing, Image(tmp_path), {})


def test_the_proof_builds_the_stages_that_the_image_is_made_of() -> None:
    assert _needed_stages(read_stages(), "cpu") == ["cpu-environment", "cpu"]

"""README's offline example runs as pasted into a file, on a bare machine too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.bare_machine import bare_environment
from tests.documents import ROOT, blocks


def test_the_offline_example_prints_its_answer(tmp_path: Path) -> None:
    (example,) = (text for text in blocks(ROOT / "README.md", "python") if "__main__" in text)
    (tmp_path / "example.py").write_text(example)
    done = subprocess.run(
        [sys.executable, tmp_path / "example.py"],
        cwd=ROOT,
        env=bare_environment(tmp_path / "machine") | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "EH9" in done.stdout.splitlines()  # vLLM logs to the same place

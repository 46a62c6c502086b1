"""What was measured of each image, kept on disk so that a run can be stopped and resumed."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from msdg_vllm.calibration.looking import Record


class Records:
    """One small file per image in a folder; a folder of another run is emptied first.

    Args:
        folder: Where the files are.
        key: What the run depends on; records of another key are of no use.
    """

    def __init__(self, folder: Path, key: dict[str, Any]) -> None:
        self._folder = folder
        text = json.dumps(key, sort_keys=True)
        marker = folder / "run.json"
        if marker.exists() and marker.read_text(encoding="utf-8") != text:
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        marker.write_text(text, encoding="utf-8")

    def get(self, name: str) -> Record | None:
        """Return a record of this or of an interrupted run."""
        path = self._folder / f"{name}.npz"
        if not path.exists():
            return None
        with np.load(path) as stored:
            return dict(stored)

    def put(self, name: str, record: Record) -> None:
        """Keep a record; a run that stops meanwhile leaves none."""
        draft = self._folder / f"{name}.draft.npz"
        np.savez(draft, **record)  # type: ignore[arg-type]
        draft.replace(self._folder / f"{name}.npz")

    def remove(self) -> None:
        """Drop all records: the run is over."""
        shutil.rmtree(self._folder)

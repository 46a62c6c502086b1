"""Threads and batches in the tests of the core."""

import pytest

from msdg_vllm.core import analysis
from tests.unit.threads import _single_thread

__all__ = ["_rows_together", "_single_thread"]


@pytest.fixture
def _rows_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handle all rows of a batch together, as on a GPU; a CPU goes row by row."""
    monkeypatch.setattr(analysis, "_ROWS_AT_ONCE", {})

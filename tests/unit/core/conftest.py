"""Threads and batches in the tests of the core."""

from collections.abc import Iterator

import pytest
import torch

from msdg_vllm.core import analysis


@pytest.fixture(scope="module", autouse=True)
def _single_thread() -> Iterator[None]:
    """The tensors are tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _rows_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handle all rows of a batch together, as on a GPU; a CPU goes row by row."""
    monkeypatch.setattr(analysis, "_ROWS_AT_ONCE", {})

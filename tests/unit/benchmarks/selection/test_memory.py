"""What pruning adds to an encoder's memory, for every family in its real shape."""

import pytest

from benchmarks.selection.encoder_memory import CASES, Case, added_bytes


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family} {case.tokens}")
def test_no_family_adds_more_than_four_states(case: Case) -> None:
    streamed = added_bytes(case, by_stream=True)
    assert 0 < streamed <= 4 * case.state_bytes
    assert added_bytes(case, by_stream=False) > 1.9 * streamed

"""What counts as survived, and wrong requests that can be sent again."""

from __future__ import annotations

import pytest

from benchmarks.chaos.fuzzing import request_of
from benchmarks.chaos.outcome import Outcome, table
from benchmarks.chaos.traffic import BROKEN, HUNG, Reply


@pytest.mark.parametrize(
    ("reply", "is_fault"),
    [
        (Reply(200, 0.1), False),
        (Reply(400, 0.1), False),
        (Reply(503, 0.1, retry_after="1"), False),
        (Reply(503, 0.1), True),
        (Reply(500, 0.1), True),
        (Reply(HUNG, 120.0), True),
        (Reply(BROKEN, 0.1), True),
    ],
)
def test_only_a_503_that_says_when_to_come_back_is_deliberate(reply: Reply, is_fault: bool) -> None:
    assert reply.is_fault is is_fault


def test_a_wrong_request_can_be_made_again_from_its_number() -> None:
    assert [request_of("m", number) for number in range(50)] == [
        request_of("m", number) for number in range(50)
    ]
    assert len({request_of("m", number)[1] for number in range(50)}) > 40


def test_the_table_shows_the_worst_and_the_first_failure() -> None:
    outcomes = [
        Outcome("SIGTERM", True, 3.0, "fine"),
        Outcome("SIGTERM", False, 61.0, "took 61 s"),
        Outcome("overload", True, 2.0, "200: 9"),
    ]
    assert table(outcomes).splitlines()[2:] == [
        "| SIGTERM | 1 of 2 | 61.0 | took 61 s |",
        "| overload | 1 of 1 | 2.0 | 200: 9 |",
    ]

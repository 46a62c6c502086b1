"""The retention mix of the command line."""

import pytest

from benchmarks.shared.retention_mix import parse_mix, show_retention


def test_a_mix_keeps_order_and_repetition() -> None:
    assert parse_mix("1.0, 0.333,0.111,0.111") == (1.0, 0.333, 0.111, 0.111)


@pytest.mark.parametrize("text", ["", " ", ","])
def test_an_empty_mix_sends_no_retention(text: str) -> None:
    assert parse_mix(text) == (None,)


def test_a_share_of_requests_may_name_none() -> None:
    assert parse_mix("default,0.5") == (None, 0.5)


@pytest.mark.parametrize("text", ["0", "1.1", "-0.5", "half", "nan", "0.5;0.1"])
def test_what_is_no_retention_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be in \(0, 1\]") as caught:
        parse_mix(f"1.0,{text}")
    assert repr(text) in str(caught.value)


def test_names_are_those_of_the_tables() -> None:
    assert show_retention(0.333) == "retention 0.333"
    assert show_retention(1.0) == "retention 1"
    assert show_retention(None) == "no retention sent"

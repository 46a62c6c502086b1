"""A stream is read as it comes: what counts as the first token, and what the answer holds."""

import json
from typing import Any

import pytest

from benchmarks.shared.client import ChatError, read_answer


def line(**chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode()


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": fields}]}


USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 91,
        "completion_tokens": 3,
        "prompt_tokens_details": {"visual_tokens": 64, "visual_tokens_total": 576},
    },
}


def test_the_first_token_is_the_first_piece_of_text() -> None:
    answer = read_answer(
        [
            (0.1, line(**delta(role="assistant", content=""))),
            (0.1, b""),
            (0.4, line(**delta(content="a "))),
            (0.6, line(**delta(content="red star"))),
            (0.7, line(**USAGE)),
            (0.8, b"data: [DONE]"),
        ]
    )
    assert (answer.ttft, answer.latency, answer.text) == (0.4, 0.8, "a red star")
    assert answer.seconds_per_output_token == pytest.approx(0.2)
    assert (answer.prompt_tokens, answer.output_tokens) == (91, 3)
    assert (answer.visual_tokens, answer.visual_tokens_total) == (64, 576)


def test_token_ids_count_as_a_token_even_without_text() -> None:
    chunks = [(0.2, line(choices=[{"delta": {"content": ""}, "token_ids": [7]}]))]
    assert read_answer(chunks).ttft == 0.2


def test_a_plain_completion_is_read_too() -> None:
    assert read_answer([(0.3, line(choices=[{"text": "yes"}]))]).text == "yes"


def test_an_endpoint_that_reports_no_usage_has_its_pieces_counted() -> None:
    pieces = [(n / 10, line(**delta(content="x"))) for n in (1, 2, 3)]
    answer = read_answer(pieces)
    assert answer.output_tokens == 3
    assert answer.visual_tokens is None


def test_one_token_has_no_time_per_token() -> None:
    assert read_answer([(0.3, line(**delta(content="x")))]).seconds_per_output_token is None


def test_an_answer_that_ends_at_once_is_an_answer() -> None:
    chunks = [
        (0.2, line(**delta(role="assistant", content=""))),
        (0.3, line(choices=[{"delta": {"content": ""}, "finish_reason": "stop"}])),
    ]
    answer = read_answer(chunks)
    assert (answer.ttft, answer.text, answer.output_tokens) == (0.3, "", 1)


def test_a_stream_without_a_token_is_an_error() -> None:
    with pytest.raises(ChatError, match="without a token"):
        read_answer([(0.1, line(**delta(role="assistant"))), (0.2, b"data: [DONE]")])


def test_an_error_inside_a_stream_is_an_error() -> None:
    with pytest.raises(ChatError, match="too long"):
        read_answer([(0.1, line(error={"message": "too long"}))])

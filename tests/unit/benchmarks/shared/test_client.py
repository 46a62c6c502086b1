"""What the client makes of a server: an answer and its times, or a sentence on what to do."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.shared.client import Client, ServerError, read_answer
from tests.loopback import Handler, listening


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
    with pytest.raises(ServerError, match="without a token"):
        read_answer([(0.1, line(**delta(role="assistant"))), (0.2, b"data: [DONE]")])


def test_an_error_inside_a_stream_is_an_error() -> None:
    with pytest.raises(ServerError, match="too long"):
        read_answer([(0.1, line(error={"message": "too long"}))])


def test_what_only_our_server_says_is_kept() -> None:
    chunk = line(**delta(content="x"), system_fingerprint="f", pruning={"id": "e"})
    answer = read_answer([(0.1, chunk), (0.2, line(**delta(content="y")))])
    assert (answer.fingerprint, answer.explanation) == ("f", "e")


class Locked(Handler):
    """A server with a key, metrics and a model that speaks; it cannot prune."""

    def do_GET(self) -> None:
        pages = {
            "/v1/models": json.dumps({"data": [{"id": "some-model"}]}),
            "/metrics": '# HELP a\na{x="1"} 2.5\na{x="2"} 4\na_total 7\nb 1\n',
        }
        if self.headers["Authorization"] != "Bearer sesame":
            self.answer(401, "{}")
        elif page := pages.get(self.path):
            self.answer(200, page)
        else:
            self.answer(404, "{}")

    def do_POST(self) -> None:
        body = json.loads(self.body())
        if "messages" in body:
            error = {"error": {"message": "retention must be in (0, 1], got 2"}}
            self.answer(400, json.dumps(error))
        else:
            self.answer(200, line(choices=[{"text": body["prompt"]}]).decode())


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with listening(Locked) as url:
        yield url


def test_a_key_is_the_one_given_or_that_of_the_environment(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert Client(f"{url}/v1/", "sesame").models() == [{"id": "some-model"}]
    with pytest.raises(ServerError, match="into the variable VLLM_API_KEY"):
        Client(url).models()
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    assert Client(url).models() == [{"id": "some-model"}]


def test_a_metric_is_summed_over_its_labels_and_none_where_there_is_none(url: str) -> None:
    client = Client(url, "sesame")
    assert (client.metric("a"), client.metric("b"), client.metric("c")) == (6.5, 1.0, None)


def test_a_server_that_cannot_prune_is_told_from_one_that_is_away(url: str) -> None:
    with pytest.raises(ServerError, match="is a server without pruning; start it with"):
        Client(url, "sesame").description()
    with pytest.raises(ServerError, match=r"no server at http://127.0.0.1:9 \(.*refused.*start"):
        Client("http://127.0.0.1:9").description()


def test_a_refusal_is_told_in_the_servers_words(url: str) -> None:
    with pytest.raises(ServerError, match=r"HTTP 400: retention must be in \(0, 1\], got 2$"):
        Client(url).ask({"messages": [], "retention": 2})


def test_a_body_without_messages_is_a_plain_completion(url: str) -> None:
    assert Client(url).ask({"prompt": "echo"}).text == "echo"

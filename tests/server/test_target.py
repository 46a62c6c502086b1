"""A server that holds a time to first token, as two API processes, and an operator's limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deployment import not_shown
from tests.documents import documented_metrics
from tests.pictures import picture_of
from tests.server.running import (
    Server,
    chat_body,
    image_part,
    running_server,
    shown_metrics,
    user,
)

QUESTION = "Read the code on the sign."
CHAT = "/v1/chat/completions"
HEADER = "X-MSDG-Retention"
FLOOR = 0.111


@pytest.fixture(scope="module")
def held(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose target no CPU can hold: it goes to the floor as soon as it knows."""
    log = tmp_path_factory.mktemp("target") / "server.log"
    options = ["--api-server-count=2", "--target-ttft=0.025", f"--min-retention={FLOOR}"]
    options += ["--max-visual-tokens-per-request=700", "--no-explain", "--no-playground"]
    with running_server(checkpoint, log, *options) as running:
        yield running


def ask(server: Server, seed: int, **fields: Any) -> Any:
    message = user(QUESTION, image_part(picture_of("square", seed)))
    return server.post(CHAT, chat_body(message, **fields))


def kept_of(answer: Any) -> int:
    kept: int = answer.json()["usage"]["prompt_tokens_details"]["visual_tokens"]
    return kept


@pytest.fixture(scope="module")
def answers(held: Server) -> list[Any]:
    """Twenty requests that leave it to the server, the first on an idle one."""
    return [ask(held, seed, **({"retention": "auto"} if seed % 2 else {})) for seed in range(20)]


def test_a_target_that_is_missed_lowers_the_retention(answers: list[Any]) -> None:
    assert [answer.status_code for answer in answers] == [200] * 20
    assert answers[0].headers[HEADER] == "1.0"
    assert kept_of(answers[0]) == 576
    assert answers[-1].headers[HEADER] == str(FLOOR)
    assert answers[-1].json()["pruning"]["retention"] == FLOOR
    assert kept_of(answers[-1]) == 64


def test_its_metrics_are_those_of_docs_and_deployment(held: Server, answers: list[Any]) -> None:
    always, with_target = documented_metrics()
    assert shown_metrics(held) == sorted(always + with_target)
    missing = not_shown(held.get("/metrics").text)
    assert [name for name, _ in missing if name.startswith("msdg_")] == []


def test_an_image_keeps_what_it_had(held: Server, answers: list[Any]) -> None:
    again = ask(held, 0)
    assert kept_of(again) == 576
    assert again.headers[HEADER] == "1.0"


def test_a_number_is_always_honoured(held: Server, answers: list[Any]) -> None:
    answer = ask(held, 100, retention=0.333)
    assert kept_of(answer) == 192
    assert HEADER not in answer.headers
    part = image_part(picture_of("square", 101), retention=0.222)
    own = held.post(CHAT, chat_body(user(QUESTION, part), retention="auto"))
    assert kept_of(own) == 128


def test_a_stream_says_what_was_chosen(held: Server, answers: list[Any]) -> None:
    answer = ask(held, 102, stream=True)
    assert answer.headers[HEADER] == str(FLOOR)
    assert f'"pruning":{{"retention":{FLOOR}}}' in answer.text


def test_all_processes_share_one_view(held: Server, answers: list[Any]) -> None:
    # Each request opens a connection, and the kernel deals connections out to the processes.
    views = [held.get("/v1/pruning").json()["adaptive"] for _ in range(6)]
    for view in views:
        assert (view["target_seconds"], view["floor"], view["ceiling"]) == (0.025, FLOOR, 1.0)
        assert FLOOR <= view["level"] <= 1
    assert len({view["measured_requests"] for view in views}) == 1
    assert views[0]["measured_requests"] >= len(answers)


def test_decisions_are_counted_by_reason(held: Server, answers: list[Any]) -> None:
    before = held.metrics()
    ask(held, 1)
    ask(held, 103)
    after = held.metrics()

    def grown(reason: str) -> float:
        name = f'msdg_retention_decisions_total{{model_name="tiny-llava",reason="{reason}"}}'
        return after[name] - before.get(name, 0)

    assert (grown("sticky"), grown("floor")) == (1, 1)
    for name in ("predicted", "measured"):
        family = f"msdg_{name}_time_to_first_token_seconds_count"
        assert after[f'{family}{{model_name="tiny-llava"}}'] >= 20
    assert FLOOR <= after['msdg_retention_level{model_name="tiny-llava"}'] <= 1


@pytest.mark.parametrize(
    ("fields", "parameter", "words"),
    [
        ({"retention": 0.05}, "retention", f"send {FLOOR} or more"),
        ({"max_visual_tokens": 10}, "max_visual_tokens", "send 64 or more for this image"),
        ({"max_visual_tokens": 0}, "max_visual_tokens", "integer of at least 1"),
        ({"max_visual_tokens": "10"}, "max_visual_tokens", "integer of at least 1"),
        ({"max_visual_tokens": 1.5}, "max_visual_tokens", "integer of at least 1"),
        ({"max_visual_tokens": True}, "max_visual_tokens", "integer of at least 1"),
        ({"retention": "automatic"}, "retention", "must be a number"),
        ({"pruning": {"explain": True}}, "pruning.explain", "turned off"),
    ],
)
def test_what_the_operator_forbids_is_refused(
    held: Server, fields: dict[str, Any], parameter: str, words: str
) -> None:
    answer = ask(held, 0, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == parameter
    assert words in answer.json()["error"]["message"]


def test_a_request_that_would_keep_too_much_is_told_where_it_fits(held: Server) -> None:
    parts = [image_part(picture_of("square", seed)) for seed in range(2)]
    refused = held.post(CHAT, chat_body(user(QUESTION, *parts), retention=1.0))
    assert refused.status_code == 400
    assert "keeps 1152 visual tokens" in refused.json()["error"]["message"]
    assert "fit at retention 0.608" in refused.json()["error"]["message"]
    fits = held.post(CHAT, chat_body(user(QUESTION, *parts), retention=0.608))
    assert kept_of(fits) == 700


def test_a_count_may_stand_in_the_request_and_in_an_image(server: Server) -> None:
    few = image_part(picture_of("square", 1), max_visual_tokens=10)
    many = image_part(picture_of("square", 2))
    answer = server.post(CHAT, chat_body(user(QUESTION, few, many), max_visual_tokens=100))
    assert kept_of(answer) == 110
    both = server.post(
        CHAT, chat_body(user(QUESTION, many), max_visual_tokens=100, retention=0.111)
    )
    assert kept_of(both) == 64


def test_auto_without_a_target_is_refused(server: Server) -> None:
    answer = ask(server, 0, retention="auto")
    assert answer.status_code == 400
    assert "--target-ttft" in answer.json()["error"]["message"]
    assert server.get("/v1/pruning").json()["adaptive"] is None


def test_the_page_can_be_switched_off(held: Server) -> None:
    assert held.get("/playground").status_code == 404

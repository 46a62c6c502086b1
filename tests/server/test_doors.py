"""Every door of the server means the same by a retention, and counts it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.pictures import picture_of
from tests.server.collector import Collector
from tests.server.running import MODEL, Server, chat_body, data_url, image_part, user

CHAT = "/v1/chat/completions"
QUESTION = "Which colour has the small triangle?"
COUNTS = {"visual_tokens": 64, "visual_tokens_total": 576}
KEPT = f'msdg_visual_tokens_kept_total{{model_name="{MODEL}"}}'


def message_body(seed: int, **fields: Any) -> dict[str, Any]:
    """A request in Anthropic's format."""
    data = data_url(picture_of("square", seed)).partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "max_tokens": 4, "temperature": 0, "messages": messages, **fields}


def kept_by(server: Server, path: str, body: Any) -> tuple[Any, float]:
    """The answer to a request, and by how much the counter of kept tokens went up."""
    before = server.metrics().get(KEPT, 0)
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer, server.metrics()[KEPT] - before


def test_a_message_is_pruned_and_counted(server: Server) -> None:
    answer, kept = kept_by(server, "/v1/messages", message_body(300, retention=0.111))
    usage = answer.json()["usage"]
    assert usage.items() >= COUNTS.items()
    assert kept == 64
    whole, kept = kept_by(server, "/v1/messages", message_body(300))
    assert kept == whole.json()["usage"]["visual_tokens"] == 576
    chat = server.post(
        CHAT, chat_body(user(QUESTION, image_part(picture_of("square", 300))), retention=0.111)
    ).json()
    cached = usage.get("cache_read_input_tokens", 0) + usage.get("cache_creation_input_tokens", 0)
    assert usage["input_tokens"] + cached == chat["usage"]["prompt_tokens"]
    assert answer.json()["content"][0]["text"] == chat["choices"][0]["message"]["content"]


def test_a_streamed_message_is_counted(server: Server) -> None:
    body = message_body(301, retention=0.111, stream=True, pruning={"explain": True})
    answer, kept = kept_by(server, "/v1/messages", body)
    assert kept == 64
    events = [
        json.loads(line.removeprefix("data: "))
        for line in answer.text.splitlines()
        if line.startswith("data: {")
    ]
    (start,) = (event["message"] for event in events if event["type"] == "message_start")
    (last,) = (event for event in events if event["type"] == "message_delta")
    assert start["usage"].items() >= COUNTS.items()
    assert last["usage"].items() >= COUNTS.items()
    assert server.get(f"/v1/pruning/{start['pruning']['id']}").status_code == 200


def test_tokens_of_a_message_are_counted_as_pruned_but_not_as_served(server: Server) -> None:
    before = server.metrics().get(KEPT, 0)
    counts = []
    for fields in ({}, {"retention": 0.111}, {"max_visual_tokens": 64}):
        body = message_body(302, **fields)
        del body["max_tokens"], body["temperature"]
        counts.append(server.post("/v1/messages/count_tokens", body).json()["input_tokens"])
    assert counts[0] - counts[1] == counts[0] - counts[2] == 576 - 64
    assert server.metrics().get(KEPT, 0) == before


def test_an_invocation_is_pruned_and_counted(server: Server) -> None:
    body = chat_body(user(QUESTION, image_part(picture_of("square", 303))), retention=0.111)
    answer, kept = kept_by(server, "/invocations", body)
    assert answer.json()["usage"]["prompt_tokens_details"].items() >= COUNTS.items()
    assert kept == 64
    answer = server.post("/invocations", {**body, "retention": 2})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "retention"


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"retntion": 0.1}, "retntion"),
        ({"prunning": {}}, "prunning"),
        ({"extra_body": {"retention": 0.1}}, "extra_body.retention"),
        ({"vllm_xargs": {"retention": 0.1}}, "vllm_xargs.retention"),
    ],
)
def test_a_near_miss_is_refused_at_every_door(
    server: Server, field: dict[str, Any], param: str
) -> None:
    body = chat_body(user("hi"), **field)
    for path in (CHAT, "/v1/responses", "/invocations", "/tokenize"):
        answer = server.post(path, {**body, "input": "hi"})
        assert answer.status_code == 400, path
        assert answer.json()["error"]["param"] == param
    answer = server.post("/v1/messages", message_body(304, **field))
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert param in answer.json()["error"]["message"]


def test_a_retention_inside_the_image_is_told_its_place(server: Server) -> None:
    url = data_url(picture_of("tiny"))
    part = {"type": "image_url", "image_url": {"url": url, "detail": "auto", "retention": 0.1}}
    answer = server.post(CHAT, chat_body(user(QUESTION, part)))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0].image_url.retention"
    assert "beside `image_url`" in answer.json()["error"]["message"]


def test_a_name_with_a_retention_is_served_and_listed(server: Server) -> None:
    names = [model["id"] for model in server.get("/v1/models").json()["data"]]
    assert names == [MODEL, f"{MODEL}@0.333", f"{MODEL}@0.111"]
    body = chat_body(user(QUESTION, image_part(picture_of("square", 305))))
    for name, fields, kept in (
        (f"{MODEL}@0.111", {}, 64),
        (f"{MODEL}@0.333", {}, 192),
        (f"{MODEL}@0.111", {"retention": 0.222}, 128),
        (f"{MODEL}@0.111", {"retention": 1.0}, 576),
    ):
        answer = server.post(CHAT, {**body, "model": name, **fields}).json()
        assert answer["usage"]["prompt_tokens_details"]["visual_tokens"] == kept
    assert server.post(CHAT, {**body, "model": f"{MODEL}@0.5"}).status_code == 404


def test_low_detail_means_what_the_operator_says(server: Server) -> None:
    url = data_url(picture_of("square", 306))
    part = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    for fields, kept in (({}, 64), ({"retention": 0.222}, 128), ({"retention": 1.0}, 576)):
        answer = server.post(CHAT, chat_body(user(QUESTION, part), **fields)).json()
        assert answer["usage"]["prompt_tokens_details"]["visual_tokens"] == kept


def test_a_prompt_too_long_by_its_images_is_told_at_which_retention_it_fits(
    server: Server,
) -> None:
    images = [image_part(picture_of("tiny", seed)) for seed in range(4)]
    answer = server.post(CHAT, chat_body(user(QUESTION, *images)))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "retention"
    assert "maximum context length is 2048 tokens" in error["message"]
    fitting = float(error["message"].partition("with retention ")[2].partition(" ")[0])
    assert server.post(CHAT, chat_body(user(QUESTION, *images), retention=fitting)).is_success
    above = round(fitting + 0.001, 3)
    refused = server.post(CHAT, chat_body(user(QUESTION, *images), retention=above))
    assert refused.status_code == 400


def test_the_span_of_a_request_says_what_was_kept_and_what_workers_did_for_it(
    server: Server, collector: Collector
) -> None:
    image = image_part(picture_of("square", 308))
    # The second question finds the image in the store, the third request its tokens in a cache.
    steps = ((QUESTION, True, True), ("Where?", False, True), ("Where?", False, False))
    for question, ran, selected in steps:
        answer = server.post(CHAT, chat_body(user(question, image), retention=0.111)).json()
        span = collector.span_of(answer["id"])
        own = {name: value for name, value in span.items() if name.startswith("msdg.")}
        assert (own.pop("msdg.selection_seconds") > 0) is selected
        assert own == {
            "msdg.retention": 0.1111,
            "msdg.method": "msdg",
            "msdg.visual_tokens": 64,
            "msdg.visual_tokens_total": 576,
            "msdg.encoder_ran": ran,
        }


def test_a_pruned_request_leaves_a_line_in_the_log_if_asked_for(server: Server) -> None:
    body = chat_body(user(QUESTION, image_part(picture_of("square", 307))), retention=0.111)
    answer = server.post(CHAT, body).json()
    (line,) = (line for line in server.log.read_text().splitlines() if answer["id"] in line)
    assert "INFO" in line
    assert "kept 64 of 576 visual tokens of 1 image by msdg" in line

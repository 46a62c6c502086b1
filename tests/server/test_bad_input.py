"""What clients get wrong: a 4xx with OpenAI's error body, and a server that keeps serving."""

from __future__ import annotations

import json
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from PIL import Image

from msdg_vllm.methods import METHODS
from tests.pictures import picture_of
from tests.server.running import (
    MAX_IMAGES,
    MODEL,
    Server,
    chat_body,
    data_url,
    image_part,
    user,
)

CHAT = "/v1/chat/completions"
QUESTION = "Which colour has the small triangle?"


@pytest.fixture(autouse=True)
def still_serving(server: Server) -> Iterator[None]:
    yield
    body = chat_body(user(QUESTION, image_part(picture_of("square"))), retention=0.056)
    answer = server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens_details"]["visual_tokens"] == 32


def assert_refused(answer: httpx.Response, param: str | None) -> str:
    assert answer.status_code == 400, (answer.status_code, answer.text[:500])
    error = answer.json()["error"]
    assert error.keys() >= {"message", "type", "param", "code"}
    assert error["code"] == 400
    assert error["param"] == param
    return str(error["message"])


def question_with(picture: Image.Image | bytes | str) -> dict[str, Any]:
    return chat_body(user(QUESTION, image_part(picture)), retention=0.111)


def png_of(picture: Image.Image) -> bytes:
    with BytesIO() as file:
        picture.save(file, "PNG")
        return file.getvalue()


def png_that_claims(width: int, height: int) -> bytes:
    """A tiny file whose header promises a huge picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    signature = b"\x89PNG\r\n\x1a\n"
    return signature + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize("value", ["0", "1.5", "-0.1", "NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_a_retention_outside_its_range_is_refused(server: Server, value: str, path: str) -> None:
    body = {"model": MODEL, "input": "hi", "messages": [user("hi")], "retention": 0}
    text = json.dumps(body).replace('"retention": 0', f'"retention": {value}')
    message = assert_refused(server.post(path, text), "retention")
    assert "(0, 1]" in message
    assert "1.0 to turn pruning off" in message


@pytest.mark.parametrize("value", ["0.5", True, [], {}, 10**400])
def test_a_retention_that_is_no_number_is_refused(server: Server, value: object) -> None:
    assert_refused(server.post(CHAT, chat_body(user("hi"), retention=value)), "retention")


@pytest.mark.parametrize("value", [0, 1.5, "0.5", True, []])
def test_a_bad_retention_of_an_image_is_refused(server: Server, value: object) -> None:
    body = chat_body(user(QUESTION, image_part(picture_of("square"), retention=value)))
    assert_refused(server.post(CHAT, body), "messages[0].content[0].retention")
    image = {"type": "input_image", "image_url": data_url(picture_of("square"))}
    turn = {"role": "user", "content": [{**image, "retention": value}]}
    answer = server.post("/v1/responses", {"model": MODEL, "input": [turn]})
    assert_refused(answer, "input[0].content[0].retention")


@pytest.mark.parametrize(
    ("pruning", "param"),
    [
        ({"budget": 3}, "pruning.budget"),
        ({"method": "fastv"}, "pruning.method"),
        ({"method": None, "scope": "world"}, "pruning.scope"),
        ({"query_mode": "first-turn"}, "pruning.query_mode"),
        ({"query": 7}, "pruning.query"),
        ({"explain": "yes"}, "pruning.explain"),
        ([], "pruning"),
        ("msdg", "pruning"),
        (0.5, "pruning"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_unknown_options_are_refused(
    server: Server, path: str, pruning: object, param: str
) -> None:
    body = {"model": MODEL, "input": "hi", "messages": [user("hi")], "pruning": pruning}
    assert_refused(server.post(path, body), param)


def test_an_unknown_method_is_answered_with_those_there_are(server: Server) -> None:
    body = chat_body(user("hi"), pruning={"method": "fastv"})
    message = assert_refused(server.post(CHAT, body), "pruning.method")
    assert all(f"'{name}'" in message for name in METHODS)
    assert "got 'fastv'" in message


def test_an_unknown_method_is_told_which_there_are(server: Server) -> None:
    answer = server.post(CHAT, chat_body(user("hi"), pruning={"method": "fastv"}))
    assert "'msdg'" in assert_refused(answer, "pruning.method")


def test_a_retention_does_not_open_the_processor_to_clients(server: Server) -> None:
    body = chat_body(
        user(QUESTION, image_part(picture_of("square"))),
        retention=0.5,
        mm_processor_kwargs={"do_resize": False},
    )
    assert_refused(server.post(CHAT, body), "mm_processor_kwargs")
    own = {"retention": 0.5}
    body = chat_body(user(QUESTION), mm_processor_kwargs=own)
    assert_refused(server.post(CHAT, body), "mm_processor_kwargs")
    body = chat_body(user(QUESTION), retention=0.5, media_io_kwargs={"image": {}})
    assert_refused(server.post(CHAT, body), "media_io_kwargs")


@pytest.mark.parametrize("field", [{"retention": 0.5}, {"pruning": {"query": "a"}}])
def test_a_prompt_without_messages_refuses_the_fields(
    server: Server, field: dict[str, Any]
) -> None:
    (name,) = field
    answer = server.post("/v1/completions", {"model": MODEL, "prompt": "hi", **field})
    assert_refused(answer, name)


def test_bad_fields_of_a_message_are_refused_in_its_own_words(server: Server) -> None:
    body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    assert server.post("/v1/messages", body).status_code == 200
    part = {"type": "text", "text": "hi", "retention": 0.5}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for field, name in (
            ({"retention": 2}, "retention"),
            ({"pruning": {"budget": 3}}, "pruning.budget"),
            ({"messages": [{"role": "user", "content": [part]}]}, "content[0].retention"),
        ):
            answer = server.post(path, {**body, **field})
            assert answer.status_code == 400
            assert answer.json()["type"] == "error"
            assert name in answer.json()["error"]["message"]


def test_a_batch_cannot_be_explained(server: Server) -> None:
    body = {**chat_body(), "messages": [[user("hi")]], "pruning": {"explain": True}}
    assert_refused(server.post(f"{CHAT}/batch", body), "pruning.explain")


@pytest.mark.parametrize(
    "url",
    {
        "broken base64": "data:image/png;base64,%%%%",
        "truncated PNG": data_url(png_of(picture_of("square"))[:2000]),
        "half a header": data_url(b"\x89PNG\r\n\x1a\n\x00\x00"),
        "text": data_url(b"This is no picture at all."),
        "empty": data_url(b""),
        "a bomb of 30,000 x 30,000": data_url(png_that_claims(30_000, 30_000)),
        "no URL": "not a url",
        "a local file": "file:///etc/hostname",
        "a dead private address": "http://127.0.0.1:9/picture.png",
        "an unknown scheme": "gopher://example.invalid/picture.png",
        "an unknown host": "http://host.invalid/picture.png",
    }.items(),
    ids=lambda named: named[0],
)
def test_a_picture_that_cannot_be_had_is_refused(server: Server, url: tuple[str, str]) -> None:
    answer = server.post(CHAT, question_with(url[1]))
    assert answer.status_code == 400, (answer.status_code, answer.text[:500])
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("size", [(1, 1), (12_000, 40), (40, 12_000)])
def test_odd_pictures_are_answered(server: Server, size: tuple[int, int]) -> None:
    answer = server.post(CHAT, question_with(Image.new("RGB", size, "red")))
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens_details"]["visual_tokens"] == 64


def test_more_images_than_the_limit_are_refused(server: Server) -> None:
    parts = [image_part(picture_of("tiny", seed)) for seed in range(50)]
    answer = server.post(CHAT, chat_body(user(QUESTION, *parts), retention=0.056))
    assert answer.status_code == 400
    assert str(MAX_IMAGES) in answer.json()["error"]["message"]


@pytest.mark.parametrize("text", ["", "   ", "\n"])
def test_an_empty_question_is_answered(server: Server, text: str) -> None:
    body = chat_body(user(text, image_part(picture_of("square"))), retention=0.111)
    assert server.post(CHAT, body).status_code == 200


def test_a_question_longer_than_the_context_is_refused(server: Server) -> None:
    body = chat_body(user("word " * 5000, image_part(picture_of("square"))), retention=0.111)
    answer = server.post(CHAT, body)
    assert answer.status_code == 400
    assert "2048" in answer.json()["error"]["message"]


def test_a_long_query_option_is_no_part_of_the_prompt(server: Server) -> None:
    message = user(QUESTION, image_part(picture_of("square")))
    plain = server.post(CHAT, chat_body(message, retention=0.111)).json()
    body = chat_body(message, retention=0.111, pruning={"query": "word " * 5000})
    answer = server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def test_a_body_that_is_no_json_is_refused(server: Server) -> None:
    for path in (CHAT, "/v1/responses", "/v1/messages"):
        assert 400 <= server.post(path, '{"retention": ').status_code < 500


def test_a_client_that_leaves_does_not_disturb_others(server: Server) -> None:
    place = urlsplit(server.url)
    for seed in range(0, 8, 2):
        picture = picture_of("huge", seed)
        body = json.dumps({**question_with(picture), "max_tokens": 500, "ignore_eos": True})
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.create_connection((place.hostname, place.port), timeout=30) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            time.sleep(0.05 * seed)
    deadline = time.monotonic() + 60
    running = 'vllm:num_requests_running{engine="0",model_name="tiny-llava"}'
    while server.metrics()[running] and time.monotonic() < deadline:
        time.sleep(0.5)
    assert server.metrics()[running] == 0

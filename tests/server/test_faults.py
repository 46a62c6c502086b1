"""Overload, late refusals, stops and kills: what other clients and the operator see of them."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.chaos.endings import left_of
from benchmarks.chaos.fuzzing import fuzz
from tests.pictures import picture_of
from tests.server.running import (
    MODEL,
    Server,
    chat_body,
    image_part,
    running_server,
    user,
)

CHAT = "/v1/chat/completions"
QUESTION = "Which of the shapes is the largest?"
QUEUE = 4


def about(seed: int, **fields: Any) -> dict[str, Any]:
    message = user(QUESTION, image_part(picture_of("square", seed)))
    return chat_body(message, retention=0.111, **fields)


@pytest.mark.parametrize(
    "wrong",
    [
        {"logit_bias": {"999999": 1}},
        {"logprobs": True, "top_logprobs": 500},
        {"max_tokens": 1_000_000},
    ],
    ids=["logit_bias", "logprobs", "length"],
)
def test_a_late_refusal_harms_nobody_with_the_same_picture(
    server: Server, wrong: dict[str, Any]
) -> None:
    seed = 700 + len(str(wrong))
    assert server.post(CHAT, about(seed, **wrong)).status_code == 400
    assert server.post(CHAT, about(seed)).status_code == 200


def test_a_client_that_leaves_harms_nobody_with_the_same_picture(server: Server) -> None:
    for seed in range(730, 740):
        with suppress(httpx.TimeoutException):
            httpx.post(server.url + CHAT, json=about(seed), timeout=0.01 * (seed - 729))
    for seed in range(730, 740):
        assert server.post(CHAT, about(seed)).status_code == 200


def test_probes_say_that_all_is_well(server: Server) -> None:
    for path in ("/health/live", "/health/ready"):
        answer = server.get(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("path", [CHAT, "/invocations", "/v1/messages", "/v1/completions"])
def test_json_that_is_nested_too_deeply_is_refused(server: Server, path: str) -> None:
    body = '{"model": "tiny-llava", "messages": ' + "[" * 990 + "]" * 990 + "}"
    assert server.post(path, body).status_code == 400


@pytest.mark.parametrize("tokens", [0, 5])
def test_a_prompt_cut_inside_its_images_is_refused(server: Server, tokens: int) -> None:
    answer = server.post(CHAT, about(0, truncate_prompt_tokens=tokens))
    assert answer.status_code == 400, answer.text
    assert "truncate_prompt_tokens" in answer.text


@pytest.mark.parametrize("value", [[None], ["x"], "x", 7])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
def test_structured_outputs_of_another_shape_are_refused(
    server: Server, path: str, value: object
) -> None:
    body = {**chat_body(user("hi")), "prompt": "hi", "input": "hi", "structured_outputs": value}
    assert server.post(path, body).status_code == 400


def test_wrong_requests_bring_no_fault(server: Server) -> None:
    replies = asyncio.run(fuzz(server.url, MODEL, 300))
    assert [reply for reply in replies if reply.is_fault] == []


def test_the_log_shows_no_explanation_id_and_no_traceback_of_a_clients_mistake(
    server: Server,
) -> None:
    answer = server.post(CHAT, about(0, pruning={"explain": True})).json()
    explanation = answer["pruning"]["id"]
    assert server.get(f"/v1/pruning/{explanation}/overlay.png").status_code == 200
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A"}}
    message = {"role": "user", "content": [image]}
    body = {"model": MODEL, "max_tokens": 4, "messages": [message]}
    start = server.log.stat().st_size
    assert server.post("/v1/messages", body).status_code == 400
    time.sleep(0.5)
    log = server.log.read_text(errors="replace")
    assert explanation not in log
    assert "/v1/pruning/.../overlay.png" in log
    added = log.encode()[start:].decode(errors="replace")
    assert "Traceback" not in added


@pytest.fixture(scope="module")
def small(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a short queue, whose clients are trusted with processor options."""
    log = tmp_path_factory.mktemp("small") / "server.log"
    options = [f"--max-num-queued-reqs={QUEUE}", "--trust-request-mm-kwargs"]
    with running_server(checkpoint, log, *options) as running:
        yield running


def test_a_refused_request_succeeds_when_it_is_sent_again(small: Server) -> None:
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda seed: small.post(CHAT, about(seed)), range(800, 824)))
    refused = [seed for seed, answer in enumerate(answers, 800) if answer.status_code == 503]
    assert {answer.status_code for answer in answers} == {200, 503}
    assert {a.headers.get("Retry-After") for a in answers if a.status_code == 503} == {"1"}
    assert {small.post(CHAT, about(seed)).status_code for seed in refused} == {200}


def test_more_answers_than_the_queue_holds_are_refused_for_good(small: Server) -> None:
    for body in (about(0, n=QUEUE + 1), about(0, n=QUEUE + 1, stream=True)):
        answer = small.post(CHAT, body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "n"
    assert small.post(CHAT, about(0, n=QUEUE, temperature=1)).status_code == 200


@pytest.mark.parametrize("retention", [0.111, 1.0])
@pytest.mark.parametrize(
    "options",
    [{"do_resize": False, "do_center_crop": False}, {"crop_size": {"height": 64, "width": 64}}],
)
def test_pixels_that_do_not_fit_the_encoder_are_refused(
    small: Server, retention: float, options: dict[str, Any]
) -> None:
    picture = picture_of("wide")
    body = chat_body(user(QUESTION, image_part(picture)), mm_processor_kwargs=options)
    answer = small.post(CHAT, {**body, "retention": retention})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "mm_processor_kwargs"
    assert small.post(CHAT, about(0)).status_code == 200


def test_a_client_cannot_ask_for_the_profiling_of_memory(small: Server) -> None:
    answer = small.post(CHAT, about(1, mm_processor_kwargs={"msdg_profiling": True}))
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens_details"]["visual_tokens"] == 64


def test_a_stop_lets_streams_end_and_refuses_new_requests(small: Server) -> None:
    """The last test of this server: it is stopped here."""
    ends: list[str] = []
    begun = threading.Barrier(3)

    def read() -> None:
        body = about(0, stream=True, max_tokens=1200, ignore_eos=True)
        with httpx.stream("POST", small.url + CHAT, json=body, timeout=120) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            begun.wait(60)
            ends.append(list(lines)[-1])

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    begun.wait(60)
    small.process.send_signal(signal.SIGTERM)
    start = time.monotonic()
    time.sleep(0.3)
    assert small.get("/health/live").status_code == 200
    assert small.get("/health/ready").status_code == 503
    refused = small.post(CHAT, about(0))
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert small.process.wait(60) == 0
    assert time.monotonic() - start < 40
    for reader in readers:
        reader.join(10)
    assert ends == ["data: [DONE]"] * 2
    assert left_of(small.process.pid) == []

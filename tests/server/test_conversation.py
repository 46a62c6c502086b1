"""Three turns about one image: which caches hit in which query mode."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.pictures import picture_of
from tests.server.running import Server, chat_body, image_part, user

BLOCK = 32
QUESTIONS = (
    "What is on the left of the red square?",
    "Is there a blue circle in the picture?",
    "How many green stars are there?",
)


ENCODED = 'msdg_encoder_images_total{model_name="tiny-llava"}'


def converse(server: Server, mode: str, seed: int) -> list[dict[str, Any]]:
    """Ask three questions about one picture, which the encoder sees once; returns the answers."""
    messages: list[dict[str, Any]] = []
    answers = []
    counts = [server.metrics().get(ENCODED, 0)]
    for number, question in enumerate(QUESTIONS):
        parts = [image_part(picture_of("square", seed))] if number == 0 else []
        messages.append(user(question, *parts))
        body = chat_body(*messages, retention=0.333, pruning={"query_mode": mode})
        answer = server.post("/v1/chat/completions", body).json()
        answers.append(answer)
        content = answer["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": content})
        counts.append(server.metrics()[ENCODED])
    assert [after - before for before, after in pairwise(counts)] == [1, 0, 0]
    return answers


def cached_tokens(answers: list[dict[str, Any]]) -> list[int]:
    return [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]


@pytest.mark.parametrize("mode", ["image-turn", "none"])
def test_a_stable_query_keeps_the_prefix_cached(server: Server, mode: str) -> None:
    answers = converse(server, mode, seed=100 if mode == "none" else 101)
    prompts = [answer["usage"]["prompt_tokens"] for answer in answers]
    first, second, third = cached_tokens(answers)
    assert first < BLOCK * 2
    assert second >= prompts[0] // BLOCK * BLOCK
    assert third >= prompts[1] // BLOCK * BLOCK


def test_last_turn_selects_anew_for_each_question(server: Server) -> None:
    answers = converse(server, "last-turn", seed=102)
    assert all(cached < 192 for cached in cached_tokens(answers))
    assert [a["usage"]["prompt_tokens_details"]["visual_tokens"] for a in answers] == [192] * 3


@pytest.mark.parametrize("mode", ["image-turn", "last-turn", "none"])
def test_two_questions_about_a_picture_share_an_encoding(server: Server, mode: str) -> None:
    picture = image_part(picture_of("square", 110 + len(mode)))
    before = server.metrics()
    for question in QUESTIONS[:2]:
        body = chat_body(user(question, picture), retention=0.333, pruning={"query_mode": mode})
        assert server.post("/v1/chat/completions", body).status_code == 200
    assert server.metrics()[ENCODED] - before.get(ENCODED, 0) == 1

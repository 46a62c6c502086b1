"""Chat completions through the official client: answers, usage, several images, many at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.pictures import picture_of
from tests.server.running import MODEL, Server, chat_body, data_url, image_part, user

QUESTION = "Is there a blue circle in the picture?"
BUDGETS = {0.056: 32, 0.111: 64, 0.222: 128, 0.333: 192, 0.9: 518, 1.0: 576}


def ask(server: Server, *messages: dict[str, Any], **extra: Any) -> Any:
    return server.client.chat.completions.create(
        model=MODEL, messages=list(messages), temperature=0, max_tokens=4, extra_body=extra
    )


def details(completion: Any) -> tuple[int, int]:
    counts = completion.usage.prompt_tokens_details
    return counts.visual_tokens, counts.visual_tokens_total


@pytest.mark.parametrize(("retention", "budget"), BUDGETS.items())
def test_usage_counts_what_the_model_saw(server: Server, retention: float, budget: int) -> None:
    message = user(QUESTION, image_part(picture_of("square")))
    pruned, full = ask(server, message, retention=retention), ask(server, message)
    assert details(pruned) == (budget, 576)
    assert full.usage.prompt_tokens - pruned.usage.prompt_tokens == 576 - budget


@pytest.mark.parametrize("absent", [{}, {"retention": None}, {"pruning": None}, {"pruning": {}}])
def test_without_a_retention_the_default_holds(server: Server, absent: dict[str, Any]) -> None:
    assert details(ask(server, user(QUESTION, image_part(picture_of("wide"))), **absent)) == (
        576,
        576,
    )


def test_a_retention_without_an_image_has_no_effect(server: Server) -> None:
    plain, pruned = ask(server, user(QUESTION)), ask(server, user(QUESTION), retention=0.1)
    assert pruned.choices[0].message.content == plain.choices[0].message.content
    assert pruned.usage.prompt_tokens == plain.usage.prompt_tokens
    assert details(pruned) == (0, 0)


def test_streaming_gives_the_same_answer_and_usage(server: Server) -> None:
    message = user(QUESTION, image_part(picture_of("tall")))
    whole = ask(server, message, retention=0.222)
    chunks = list(
        server.client.chat.completions.create(
            model=MODEL,
            messages=[message],
            temperature=0,
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"retention": 0.222},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert details(chunks[-1]) == (128, 576)
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_streaming_without_usage_has_no_usage_chunk(server: Server) -> None:
    chunks = list(
        server.client.chat.completions.create(
            model=MODEL,
            messages=[user(QUESTION, image_part(picture_of("tall")))],
            max_tokens=4,
            stream=True,
            extra_body={"retention": 0.222},
        )
    )
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_each_image_may_have_its_own_retention(server: Server) -> None:
    message = user(
        QUESTION,
        image_part(picture_of("square", 1), retention=0.5),
        image_part(picture_of("square", 2)),
        image_part(picture_of("wide", 3), retention=1.0),
    )
    assert details(ask(server, message, retention=0.111)) == (288 + 64 + 576, 3 * 576)


def test_several_choices_count_the_prompt_once(server: Server) -> None:
    completion = server.client.chat.completions.create(
        model=MODEL,
        messages=[user(QUESTION, image_part(picture_of("square")))],
        n=3,
        seed=1,
        max_tokens=4,
        extra_body={"retention": 0.111},
    )
    assert len(completion.choices) == 3
    assert details(completion) == (64, 576)


def test_a_batch_answers_like_its_conversations_alone(server: Server) -> None:
    messages = [user(QUESTION, image_part(picture_of("square", seed))) for seed in range(2)]
    body = chat_body(retention=0.111)
    answer = server.post(
        "/v1/chat/completions/batch", {**body, "messages": [[message] for message in messages]}
    ).json()
    alone = [ask(server, message, retention=0.111) for message in messages]
    assert [choice["message"]["content"] for choice in answer["choices"]] == [
        completion.choices[0].message.content for completion in alone
    ]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == sum(completion.usage.prompt_tokens for completion in alone)
    assert usage["prompt_tokens_details"]["visual_tokens"] == 128
    assert usage["prompt_tokens_details"]["visual_tokens_total"] == 1152


def test_many_at_once_answer_like_one_by_one(server: Server) -> None:
    retentions = (0.056, 0.111, 0.333, 1.0)
    requests = [
        (user(f"{QUESTION} {number % 5}", image_part(picture_of("square", number % 7))), retention)
        for number, retention in enumerate(retentions * 8)
    ]

    def answer(request: tuple[dict[str, Any], float]) -> tuple[Any, Any]:
        message, retention = request
        completion = server.client.chat.completions.create(
            model=MODEL,
            messages=[message],
            temperature=0,
            max_tokens=6,
            logprobs=True,
            extra_body={"retention": retention},
        )
        tokens = [token.token for token in completion.choices[0].logprobs.content]
        return tokens, details(completion)

    with ThreadPoolExecutor(len(requests)) as pool:
        at_once = list(pool.map(answer, requests))
    assert at_once == [answer(request) for request in requests]


def test_the_question_decides_what_is_kept(server: Server) -> None:
    picture = picture_of("square", 5)
    kept = []
    for question in (QUESTION, "Read the code on the sign."):
        body = chat_body(
            user(question, image_part(picture)), retention=0.111, pruning={"explain": True}
        )
        answer = server.post("/v1/chat/completions", body).json()
        explanation = server.get(f"/v1/pruning/{answer['pruning']['id']}").json()
        kept.append(explanation["images"][0]["kept"])
    assert kept[0] != kept[1]


def test_responses_take_the_same_fields(server: Server) -> None:
    picture = data_url(picture_of("square"))
    content = [
        {"type": "input_text", "text": QUESTION},
        {"type": "input_image", "image_url": picture, "detail": "auto"},
        {"type": "input_image", "image_url": picture, "detail": "auto", "retention": 0.5},
    ]
    options: dict[str, Any] = {
        "model": MODEL,
        "input": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_output_tokens": 16,
        "extra_body": {"retention": 0.111, "pruning": {"explain": True}},
    }
    response = server.client.responses.create(**options)
    counts: Any = response.usage.input_tokens_details
    assert (counts.visual_tokens, counts.visual_tokens_total) == (64 + 288, 1152)
    explanation = server.get(f"/v1/pruning/{response.pruning['id']}").json()
    assert [len(image["kept"]) for image in explanation["images"]] == [64, 288]

    *_, last = server.client.responses.create(**options, stream=True)
    assert last.type == "response.completed"
    assert last.response.usage.input_tokens_details.visual_tokens == 352
    assert last.response.output_text == response.output_text


def test_structured_output_and_logprobs_stay_vllms(server: Server) -> None:
    completion = server.client.chat.completions.create(
        model=MODEL,
        messages=[user(QUESTION, image_part(picture_of("square")))],
        temperature=0,
        max_tokens=8,
        logprobs=True,
        top_logprobs=2,
        extra_body={"retention": 0.111, "structured_outputs": {"choice": ["yes", "no"]}},
    )
    assert completion.choices[0].message.content in ("yes", "no")
    assert len(completion.choices[0].logprobs.content[0].top_logprobs) == 2


def test_tokenize_counts_pruned_prompts(server: Server) -> None:
    message = user(QUESTION, image_part(picture_of("square")))
    body = {"model": MODEL, "messages": [message], "retention": 0.111}
    count = server.post("/tokenize", body).json()["count"]
    assert count == ask(server, message, retention=0.111).usage.prompt_tokens

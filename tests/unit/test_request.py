"""What a client sends about pruning is checked once, in the same words over HTTP and offline."""

from __future__ import annotations

from typing import Any

import pytest

from msdg_vllm.core.errors import RequestError
from msdg_vllm.request import (
    OPTIONS,
    PruningRequest,
    Turns,
    check_names,
    check_parts,
    check_processor_kwargs,
)


def refusal(call: Any, *args: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call(*args)
    return caught.value


def test_our_keys_leave_the_kwargs_and_the_others_stay() -> None:
    kwargs: dict[str, Any] = {
        "retention": 0.5,
        "pruning": {"method": "random", "query": None, "scope": "image"},
        "do_resize": False,
    }
    assert PruningRequest.take_from(kwargs) == PruningRequest(0.5, method="random", scope="image")
    assert kwargs == {"do_resize": False}
    assert PruningRequest.take_from(kwargs).is_default


def test_a_typed_value_is_taken_as_it_is() -> None:
    request = PruningRequest(method="random", turns=Turns("What is it?"))
    assert PruningRequest.take_from({"pruning": request}) is request
    both = PruningRequest.take_from({"pruning": request, "retention": 0.5})
    assert both.retention == 0.5
    assert both.turns == request.turns
    assert not both.is_default
    assert PruningRequest(turns=Turns("What is it?")).is_default


def test_an_explained_request_gets_a_key_of_its_own() -> None:
    keys = {PruningRequest.parse(pruning={"explain": True}).explanation for _ in range(3)}
    assert len(keys) == 3
    assert all(0 < key < 2**63 for key in keys)
    assert PruningRequest.parse(pruning={"explain": False}).explanation == 0


@pytest.mark.parametrize(
    ("pruning", "parameter", "words"),
    [
        ("msdg", "pruning", "must be an object with keys among query, .*, got 'msdg'"),
        ({"budget": 3}, "pruning.budget", "allowed are query, query_mode, method, scope, explain"),
        ({"methd": "msdg"}, "pruning.methd", "did you mean method?"),
        ({"retention": 0.5}, "pruning.retention", "retention stands beside `pruning`"),
        ({"method": "fastv"}, "pruning.method", "one of 'msdg', 'random'.*, got 'fastv'"),
        ({"query_mode": 7}, "pruning.query_mode", "one of 'image-turn', .*, got 7"),
        ({"scope": "world"}, "pruning.scope", "one of 'tile', 'image', got 'world'"),
        ({"query": ["a"]}, "pruning.query", "must be a string, got"),
        ({"explain": "yes"}, "pruning.explain", "must be true or false, got 'yes'"),
    ],
)
def test_bad_options_are_named_as_the_body_has_them(
    pruning: Any, parameter: str, words: str
) -> None:
    error = refusal(PruningRequest.parse, None, pruning)
    assert error.parameter == parameter
    with pytest.raises(RequestError, match=words):
        raise error


def test_a_retention_in_quotes_is_told_to_be_a_number() -> None:
    error = refusal(PruningRequest.parse, "0.2")
    assert error.parameter == "retention"
    assert "got '0.2'" in str(error)
    assert "must be a number" in str(error)
    assert "must be a number" not in str(refusal(PruningRequest.parse, 2))


@pytest.mark.parametrize("key", OPTIONS)
def test_an_old_flat_key_names_its_new_place(key: str) -> None:
    error = refusal(check_processor_kwargs, {"retention": 0.5, key: "msdg"})
    assert f'mm_processor_kwargs={{"pruning": {{"{key}": ...}}}}' in str(error)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("retntion", "retention"),
        ("retentoin", "retention"),
        ("Retention", "retention"),
        ("retention_rate", "retention"),
        ("prunning", "pruning"),
        ("pruning_options", "pruning"),
    ],
)
def test_a_near_miss_names_the_right_key(key: str, meant: str) -> None:
    error = refusal(check_names, {key}, "")
    assert error.parameter == key
    assert f"did you mean `{meant}`?" in str(error)
    assert f"mm_processor_kwargs.{key}" in str(refusal(check_processor_kwargs, {key: 0.1}))


@pytest.mark.parametrize(
    "key", ["attention", "detection", "rotation", "reasoning", "truncation", "do_resize", "tuning"]
)
def test_other_words_are_no_near_misses(key: str) -> None:
    check_processor_kwargs({key: 1})


@pytest.mark.parametrize(
    ("part", "parameter", "words"),
    [
        ({"image_url": {"url": "", "retention": 0.1}}, "image_url.retention", "beside `image_url`"),
        ({"image_url": {"url": "", "retntion": 0.1}}, "image_url.retntion", "beside `image_url`"),
        ({"image_url": {"url": ""}, "retenton": 0.1}, "retenton", "did you mean `retention`?"),
        ({"image_url": {"url": ""}, "pruning": {}}, "pruning", "`pruning` belongs to the request"),
        ({"image_url": {"url": ""}, "retention": 2}, "retention", "retention must be in (0, 1]"),
    ],
)
def test_an_image_part_is_checked_in_every_place(
    part: dict[str, Any], parameter: str, words: str
) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}, part]}]
    for turns, where in ((messages, "messages[0]"), ([messages], "messages[0][0]")):
        error = refusal(check_parts, turns, "messages")
        assert error.parameter == f"{where}.content[1].{parameter}"
        assert words in str(error)


def test_a_conversation_without_mistakes_passes() -> None:
    image = {"type": "image_url", "image_url": {"url": "", "detail": "low"}, "retention": 0.5}
    check_parts([{"role": "user", "content": [image]}, {"role": "user", "content": "hi"}], "input")
    check_parts("hi", "input")


def test_a_count_travels_beside_the_retention() -> None:
    request = PruningRequest.take_from({"retention": 0.5, "max_visual_tokens": 64})
    assert (request.retention, request.max_visual_tokens) == (0.5, 64)
    assert not PruningRequest(max_visual_tokens=1).is_default
    typed = PruningRequest.take_from({"pruning": PruningRequest(0.5), "max_visual_tokens": 3})
    assert (typed.retention, typed.max_visual_tokens) == (0.5, 3)


@pytest.mark.parametrize("value", [0, -1, "64", 64.0, True, [64]])
def test_a_count_is_a_whole_number_of_at_least_one(value: object) -> None:
    error = refusal(PruningRequest.parse, None, None, value)
    assert error.parameter == "max_visual_tokens"
    assert "must be an integer of at least 1" in str(error)
    part = {"type": "image_url", "image_url": {"url": "x"}, "max_visual_tokens": value}
    messages = [{"role": "user", "content": [part]}]
    assert refusal(check_parts, messages, "messages").parameter == (
        "messages[0].content[0].max_visual_tokens"
    )


def test_the_retention_may_be_left_to_the_server() -> None:
    assert PruningRequest.parse("auto").retention == "auto"
    assert refusal(PruningRequest.parse, "Auto").parameter == "retention"

"""Requests that are wrong: values, shapes, images, bytes; the same ones for the same number."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from benchmarks.chaos.traffic import CHAT, Reply, chat, client_of, image_part, many, post

ROUTES = (
    CHAT,
    CHAT,
    CHAT,
    "/v1/responses",
    "/v1/messages",
    "/v1/completions",
    "/invocations",
    "/tokenize",
    "/v1/chat/completions/batch",
)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, 1.5, -0.0, 1e-9, 1e308),
    *("", "0.5", "\x00", "\ud83d\ude00" * 50, "a" * 5000, "<image>" * 9),
    *([], {}, [None], [[]], {"": None}, {"a": {"b": [1]}}, [1, "x"], [{}]),
)
FIELDS = (
    *("retention", "pruning", "messages", "model", "max_tokens", "temperature", "top_p", "n"),
    *("stop", "logit_bias", "logprobs", "top_logprobs", "seed", "stream", "stream_options"),
    *("truncate_prompt_tokens", "structured_outputs", "response_format", "tools", "tool_choice"),
    *("mm_processor_kwargs", "media_io_kwargs", "prompt_logprobs", "min_tokens", "cache_salt"),
    *("priority", "bad_words", "allowed_token_ids", "add_generation_prompt", "chat_template"),
    *("echo", "best_of", "suffix", "input", "prompt", "user", "metadata", "guided_json"),
)
OPTIONS = ("method", "scope", "query", "query_mode", "explain", "budget", "retention")
URLS = (
    *("data:image/png;base64,AAAA", "data:,", "data:image/png;base64,", "file:///etc/hostname"),
    *("http://127.0.0.1:9/x.png", "ftp://x", "not a url", "data:image/svg+xml;base64,PHN2Zy8+"),
)

Mutation = Callable[[dict[str, Any], random.Random], None]


def _odd_field(body: dict[str, Any], chance: random.Random) -> None:
    body[chance.choice(FIELDS)] = copy.deepcopy(chance.choice(ODD))


def _odd_option(body: dict[str, Any], chance: random.Random) -> None:
    body["pruning"] = {chance.choice(OPTIONS): copy.deepcopy(chance.choice(ODD))}


def _odd_part(body: dict[str, Any], chance: random.Random) -> None:
    content = body["messages"][0]["content"]
    part = chance.choice(content)
    part[chance.choice((*part, "retention", "type", "uuid"))] = copy.deepcopy(chance.choice(ODD))


def _odd_image(body: dict[str, Any], chance: random.Random) -> None:
    body["messages"][0]["content"].append(
        {"type": "image_url", "image_url": {"url": chance.choice(URLS)}}
    )


def _cut_image(body: dict[str, Any], chance: random.Random) -> None:
    part = image_part(chance.randrange(20))
    url = part["image_url"]["url"]
    part["image_url"]["url"] = url[: chance.randrange(20, len(url))]
    body["messages"][0]["content"].append(part)


def _odd_turn(body: dict[str, Any], chance: random.Random) -> None:
    body["messages"].insert(chance.randrange(2), copy.deepcopy(chance.choice(ODD)))


def _deep(body: dict[str, Any], chance: random.Random) -> None:
    value: Any = 1
    for _ in range(chance.choice((50, 400, 900))):
        value = [value]
    body[chance.choice(FIELDS)] = value


def _missing(body: dict[str, Any], chance: random.Random) -> None:
    del body[chance.choice(list(body))]


MUTATIONS: tuple[Mutation, ...] = (
    *(_odd_field, _odd_field, _odd_field, _odd_option, _odd_part, _odd_image, _cut_image),
    *(_odd_turn, _deep, _missing),
)


def request_of(model: str, number: int) -> tuple[str, bytes]:
    """Return the path and the body of wrong request `number`."""
    chance = random.Random(number)
    path = chance.choice(ROUTES)
    body = chat(model, [image_part(chance.randrange(20))], retention=0.111, max_tokens=2)
    if path == "/v1/responses":
        body["input"] = "How many red circles are there?"
    elif path == "/v1/completions":
        body["prompt"] = "How many red circles are there?"
    for _ in range(chance.randint(1, 3)):
        try:
            chance.choice(MUTATIONS)(body, chance)
        except (KeyError, TypeError, AttributeError, IndexError):
            continue  # an earlier mutation took away what this one changes
    # Few answers, whatever was asked for: this is about faults, not about load.
    for name in ("max_tokens", "max_output_tokens", "max_completion_tokens"):
        if isinstance(body.get(name), int) and body[name] > 16:
            body[name] = 16
    data = json.dumps(body).encode(errors="surrogatepass")
    if chance.random() < 0.05:
        cut = chance.randrange(len(data))
        data = chance.choice((data[:cut], data[:cut] + b"\xff\xfe" + data[cut:], b"[" * 990))
    return path, data


async def fuzz(url: str, model: str, num_requests: int, first: int = 0) -> list[Reply]:
    """Send wrong requests, a few at a time."""
    async with client_of(url) as client:

        async def send(number: int) -> Reply:
            path, data = request_of(model, first + number)
            return await post(client, data, path)

        return await many(send, num_requests, at_once=8)

"""One streamed chat completion and its times; works with every OpenAI-compatible endpoint."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import requests


class ChatError(Exception):
    """An answer that is no stream of tokens: an HTTP error, or a stream without any token."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back, and when; docs/performance.md defines the times.

    Attributes:
        ttft: Seconds from sending the request to the first token.
        latency: Seconds from sending the request to the end of the stream.
        text: What the model said.
        prompt_tokens: Tokens the language model saw; 0 where the endpoint reports no usage.
        output_tokens: Tokens the language model wrote.
        visual_tokens: Visual tokens among the prompt tokens; None from other servers than ours.
        visual_tokens_total: Visual tokens there were before pruning; None likewise.
    """

    ttft: float
    latency: float
    text: str
    prompt_tokens: int
    output_tokens: int
    visual_tokens: int | None = None
    visual_tokens_total: int | None = None

    @property
    def seconds_per_output_token(self) -> float | None:
        """Time per token after the first; None when there is only one."""
        if self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)


def stream(
    session: requests.Session, url: str, body: Mapping[str, Any], *, timeout: float = 600
) -> Answer:
    """Send `body` to `url`, `/v1/chat/completions` or `/v1/completions`, and read it to its end.

    Raises:
        ChatError: The endpoint refused, or no token came.
        requests.RequestException: The connection failed.
    """
    wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
    data = json.dumps(wanted).encode()  # not part of the time
    headers = {"Content-Type": "application/json"}
    start = time.perf_counter()
    with session.post(url, data=data, headers=headers, stream=True, timeout=timeout) as response:
        if response.status_code != 200:
            raise ChatError(f"HTTP {response.status_code}: {response.text[:500]}")
        return read_answer(_timed_lines(response.iter_lines(), start))


def _timed_lines(lines: Iterable[bytes], start: float) -> Iterator[tuple[float, bytes]]:
    for line in lines:
        yield time.perf_counter() - start, line


def read_answer(timed_lines: Iterable[tuple[float, bytes]]) -> Answer:
    """Put an answer together from the lines of a stream, each with its seconds since the request.

    The first token is the first piece of text, or of token ids where the request asked vLLM for
    them, or the end of an empty answer: some endpoints open a stream before they have a token.
    """
    ttft, latency, num_pieces = None, 0.0, 0
    text: list[str] = []
    usage: dict[str, Any] = {}
    for latency, line in timed_lines:
        payload = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or payload == b"[DONE]":
            continue
        chunk = json.loads(payload)
        if "error" in chunk:
            raise ChatError(f"the stream broke off: {chunk['error']}")
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta", {})
            piece = choice.get("text") or delta.get("content") or delta.get("reasoning") or ""
            has_token = bool(piece or choice.get("token_ids"))
            # An answer may consist of its end alone, which is a token that is not shown.
            if ttft is None and (has_token or choice.get("finish_reason")):
                ttft = latency
            num_pieces += has_token
            text.append(piece)
    if ttft is None:
        raise ChatError("the stream ended without a token")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        ttft=ttft,
        latency=latency,
        text="".join(text),
        prompt_tokens=usage.get("prompt_tokens", 0),
        output_tokens=usage.get("completion_tokens") or max(num_pieces, 1),
        visual_tokens=details.get("visual_tokens"),
        visual_tokens_total=details.get("visual_tokens_total"),
    )


def served_model(session: requests.Session, host: str) -> str:
    """Return the name of the first model that the endpoint at `host` serves."""
    response = session.get(f"{host}/v1/models", timeout=30)
    if response.status_code != 200:
        raise ChatError(f"GET {host}/v1/models: HTTP {response.status_code}")
    return str(response.json()["data"][0]["id"])

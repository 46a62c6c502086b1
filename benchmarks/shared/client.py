"""The client of all benchmarks: it asks a server and keeps what it says, and when.

Every OpenAI-compatible server will do; what only ours says is None from others.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import requests

# More threads than ask at once: a connection that finds no place would be closed after each use.
_MAX_CONNECTIONS = 128
_SECONDS = 60  # for what is not an answer of the model


class ServerError(Exception):
    """The server is away, refuses, or says something unusable; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back, and when; docs/performance.md defines the times.

    Attributes:
        ttft: Seconds from sending the request to the first token.
        latency: Seconds from sending the request to the end of the stream.
        text: What the model said.
        prompt_tokens: Tokens the language model saw; 0 where the server reports no usage.
        output_tokens: Tokens the language model wrote.
        visual_tokens: Visual tokens among the prompt tokens; None from other servers than ours.
        visual_tokens_total: Visual tokens there were before pruning; None likewise.
        fingerprint: The server's name for its version and configuration.
        explanation: The id under which the server explains what it kept, if that was asked for.
    """

    ttft: float
    latency: float
    text: str
    prompt_tokens: int
    output_tokens: int
    visual_tokens: int | None = None
    visual_tokens_total: int | None = None
    fingerprint: str | None = None
    explanation: str | None = None

    @property
    def seconds_per_output_token(self) -> float | None:
        """Time per token after the first; None when there is only one."""
        if self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)


class Client:
    """A client of one server, which several threads may use.

    Args:
        url: With or without `/v1`.
        key: What is sent as a bearer token; the default is the variable that vLLM's server reads.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._session = requests.Session()
        adapter = requests.adapters.HTTPAdapter(pool_maxsize=_MAX_CONNECTIONS)
        self._session.mount("http://", adapter)
        self._session.mount("https://", adapter)
        if key := key or os.environ.get("VLLM_API_KEY"):
            self._session.headers["Authorization"] = f"Bearer {key}"

    def get(self, path: str) -> requests.Response:
        """Fetch a path."""
        return self._send("GET", path, timeout=_SECONDS)

    def models(self) -> list[dict[str, Any]]:
        """Return the models that are served, the base model first."""
        models: list[dict[str, Any]] = self.get("/v1/models").json()["data"]
        return models

    def description(self) -> dict[str, Any]:
        """Return what a server of ours says about its pruning."""
        described: dict[str, Any] = self.get("/v1/pruning").json()
        return described

    def explanation(self, identifier: str) -> dict[str, Any]:
        """Return what was kept of the first image of an explained request."""
        image: dict[str, Any] = self.get(f"/v1/pruning/{identifier}").json()["images"][0]
        return image

    def metric(self, name: str) -> float | None:
        """Return the sum of a metric's samples over all labels; None where it has none."""
        lines = self.get("/metrics").text.splitlines()
        samples = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rpartition(" ")[2]) for line in samples) if samples else None

    def call_workers(self, method: str) -> Any:
        """Call a method of the workers' extension and return what the first of them returned.

        Tensor-parallel ranks do the same work: one speaks for all.
        """
        response = self._send("POST", "/collective_rpc", json={"method": method}, timeout=_SECONDS)
        return response.json()["results"][0]

    def ask(self, body: Mapping[str, Any], timeout: float = 600) -> Answer:
        """Stream the answer to a chat, or to a plain prompt where `body` has no messages."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
        data = json.dumps(wanted).encode()  # not part of the time
        start = time.perf_counter()
        with self._send(
            "POST",
            path,
            data=data,
            headers={"Content-Type": "application/json"},
            stream=True,
            timeout=timeout,
        ) as response:
            try:
                return read_answer(_timed_lines(response.iter_lines(), start))
            except requests.RequestException as error:
                raise ServerError(f"the server at {self.url} went away: {error}") from error

    def _send(self, method: str, path: str, **options: Any) -> requests.Response:
        try:
            response = self._session.request(method, self.url + path, **options)
        except (requests.RequestException, ValueError) as error:
            raise ServerError(
                f"no server at {self.url} ({_cause(error)}); start one with `make serve` or "
                "`python -m server --model ...`, or name the one that is up"
            ) from error
        if response.status_code == 401:
            raise ServerError(f"{self.url} wants an API key: put it into the variable VLLM_API_KEY")
        if response.status_code == 404 and path == "/v1/pruning":
            raise ServerError(
                f"{self.url} is a server without pruning; start it with `make serve` or "
                "`python -m server --model ...`, or with VLLM_PLUGINS=msdg"
            )
        if not response.ok:
            raise ServerError(
                f"{method} {self.url}{path}: HTTP {response.status_code}: {_reason(response)}"
            )
        return response


def _cause(error: BaseException) -> str:
    """Return the innermost reason of a failed connection, in one line."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _reason(response: requests.Response) -> str:
    """Return the message of an error in OpenAI's shape, or the start of whatever it is."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return response.text[:500]


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
    fingerprint, explanation = None, None
    for latency, line in timed_lines:
        payload = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or payload == b"[DONE]":
            continue
        chunk = json.loads(payload)
        if "error" in chunk:
            raise ServerError(f"the stream broke off: {chunk['error']}")
        usage = chunk.get("usage") or usage
        fingerprint = chunk.get("system_fingerprint") or fingerprint
        explanation = (chunk.get("pruning") or {}).get("id") or explanation
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
        raise ServerError("the stream ended without a token")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        ttft=ttft,
        latency=latency,
        text="".join(text),
        prompt_tokens=usage.get("prompt_tokens", 0),
        output_tokens=usage.get("completion_tokens") or max(num_pieces, 1),
        visual_tokens=details.get("visual_tokens"),
        visual_tokens_total=details.get("visual_tokens_total"),
        fingerprint=fingerprint,
        explanation=explanation,
    )

"""Endpoint: a running server, asked through the official OpenAI client."""

import base64
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from typing import Any

import httpx
from openai import APIConnectionError, APIStatusError, OpenAI
from PIL import Image

from benchmarks.quality.cases import UNPRUNED

_MAX_ANSWER_TOKENS = 8
_TIMEOUT = 120.0


class EndpointError(Exception):
    """The server is away, or refuses what the benchmark asks; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server said to one question."""

    text: str
    prompt_tokens: int
    visual_tokens: int
    fingerprint: str | None  # vLLM's name for its version and configuration
    explanation: str | None  # id


class Endpoint:
    """A client of one server.

    Attributes:
        model: The name the model is served under.
        root: Where the server has the model from, a path or a repository.
        description: What `GET /v1/pruning` says.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._client = OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=_TIMEOUT)
        try:
            served = self._client.with_options(max_retries=0).models.list().data[0]
            response = httpx.get(f"{self.url}/v1/pruning", timeout=_TIMEOUT)
        except (APIConnectionError, httpx.HTTPError) as error:
            raise EndpointError(
                f"no server at {self.url}; start one with `make serve` or name it with --server"
            ) from error
        if response.status_code != 200:
            raise EndpointError(
                f"the server at {self.url} cannot prune: GET /v1/pruning gave "
                f"{response.status_code}; start it with `make serve` or `python -m server`"
            )
        self.model: str = served.id
        self.root = str((served.model_extra or {}).get("root") or served.id)
        self.description: dict[str, Any] = response.json()

    @property
    def methods(self) -> list[str]:
        methods: list[str] = self.description["methods"]
        return methods

    def check_methods(self, methods: list[str]) -> None:
        """Raise an `EndpointError` that names the methods the server does not know."""
        if unknown := [method for method in methods if method not in self.methods]:
            raise EndpointError(
                f"the server at {self.url} does not know {', '.join(unknown)}; "
                f"it offers {', '.join(self.methods)}"
            )

    def ask(
        self,
        picture: str,
        question: str,
        method: str,
        retention: Fraction = UNPRUNED,
        explain: bool = False,
    ) -> Answer:
        """Return the greedy answer to a question about a picture given as a data URL."""
        body: dict[str, Any] = {"retention": float(retention)}
        if retention != UNPRUNED:
            body["pruning"] = {"method": method, "explain": explain}
        try:
            said = self._client.chat.completions.create(
                model=self.model,
                messages=[
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": picture}},
                            {"type": "text", "text": question},
                        ],
                    }
                ],
                temperature=0,
                max_tokens=_MAX_ANSWER_TOKENS,
                extra_body=body,
            )
        except APIConnectionError as error:
            raise EndpointError(f"the server at {self.url} went away: {error}") from error
        except APIStatusError as error:
            raise EndpointError(
                f"the server refused method {method!r} at retention {retention}: {error.message}"
            ) from error
        details = said.usage.prompt_tokens_details if said.usage else None
        counts = (details.model_extra or {}) if details else {}
        return Answer(
            text=said.choices[0].message.content or "",
            prompt_tokens=said.usage.prompt_tokens if said.usage else 0,
            visual_tokens=int(counts.get("visual_tokens", 0)),
            fingerprint=said.system_fingerprint,
            explanation=((said.model_extra or {}).get("pruning") or {}).get("id"),
        )

    def explanation(self, identifier: str) -> dict[str, Any]:
        """Return what was kept of the first image of an explained request."""
        response = httpx.get(f"{self.url}/v1/pruning/{identifier}", timeout=_TIMEOUT)
        if response.status_code != 200:
            raise EndpointError(f"no explanation {identifier}: {response.text}")
        image: dict[str, Any] = response.json()["images"][0]
        return image


def picture_url(picture: Image.Image) -> str:
    """Return a picture as a data URL, without loss."""
    with BytesIO() as file:
        picture.save(file, "PNG")
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"

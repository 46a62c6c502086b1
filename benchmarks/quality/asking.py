"""Asking a running server the questions of this benchmark."""

from fractions import Fraction
from typing import Any

from benchmarks.quality.cases import UNPRUNED
from benchmarks.shared.client import Answer, Client, ServerError

_MAX_ANSWER_TOKENS = 8
_SECONDS = 120


class Endpoint:
    """A server of ours.

    Attributes:
        model: The name the model is served under.
        root: Where the server has the model from, a path or a repository.
        description: What `GET /v1/pruning` says.
    """

    def __init__(self, url: str) -> None:
        self.client = Client(url)
        served = self.client.models()[0]
        self.model = str(served["id"])
        self.root = str(served.get("root") or served["id"])
        self.description = self.client.description()

    @property
    def methods(self) -> list[str]:
        methods: list[str] = self.description["methods"]
        return methods

    def check_methods(self, methods: list[str]) -> None:
        """Raise a `ServerError` that names the methods the server does not know."""
        if unknown := [method for method in methods if method not in self.methods]:
            raise ServerError(
                f"the server at {self.client.url} does not know {', '.join(unknown)}; "
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
        content = [
            {"type": "image_url", "image_url": {"url": picture}},
            {"type": "text", "text": question},
        ]
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": _MAX_ANSWER_TOKENS,
            "retention": float(retention),
        }
        if retention != UNPRUNED:
            body["pruning"] = {"method": method, "explain": explain}
        return self.client.ask(body, timeout=_SECONDS)

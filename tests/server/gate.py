"""A reverse proxy on loopback: a path prefix in front of a server, with a key or a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from tests.loopback import Handler, listening

PREFIX = "/ai/models"


@dataclass(slots=True)
class Gate:
    """What stands in front of a server, as the tests set it.

    Attributes:
        url: Where browsers go.
        key: What /v1 asks for; empty lets everybody in.
        busy: Whether chats are answered with a 503.
    """

    url: str
    key: str = ""
    busy: bool = False


@contextmanager
def gate_before(server_url: str) -> Iterator[Gate]:
    """Run the proxy."""

    class Forwarding(Handler):
        def do_GET(self) -> None:
            self._forward()

        def do_POST(self) -> None:
            self._forward()

        def _forward(self) -> None:
            body = self.body()
            path = self.path.removeprefix(PREFIX)
            if path == self.path:
                self.answer(404, b'{"error": "outside of the prefix"}')
            elif (
                gate.key
                and path.startswith("/v1")
                and self.headers.get("Authorization") != f"Bearer {gate.key}"
            ):
                self.answer(401, b'{"error": "Unauthorized"}')
            elif gate.busy and path.endswith("/chat/completions"):
                self.answer(503, b"<html>overloaded</html>", {"Retry-After": "7"})
            else:
                headers = {"Content-Type": self.headers.get("Content-Type") or "text/plain"}
                answer = httpx.request(
                    self.command, server_url + path, headers=headers, content=body, timeout=120
                )
                kept = {"Content-Type", "Content-Security-Policy", "X-Content-Type-Options"}
                self.answer(
                    answer.status_code,
                    answer.content,
                    {name: answer.headers[name] for name in kept if name in answer.headers},
                )

    gate = Gate("")
    with listening(Forwarding) as url:
        gate.url = url + PREFIX
        yield gate

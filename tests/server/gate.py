"""A reverse proxy on loopback: a path prefix in front of a server, with a key or a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx

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

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._forward()

        def do_POST(self) -> None:
            self._forward()

        def log_message(self, *_: object) -> None:
            pass

        def _forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.removeprefix(PREFIX)
            if path == self.path:
                self._answer(404, b'{"error": "outside of the prefix"}')
            elif (
                gate.key
                and path.startswith("/v1")
                and self.headers.get("Authorization") != f"Bearer {gate.key}"
            ):
                self._answer(401, b'{"error": "Unauthorized"}')
            elif gate.busy and path.endswith("/chat/completions"):
                self._answer(503, b"<html>overloaded</html>", {"Retry-After": "7"})
            else:
                headers = {"Content-Type": self.headers.get("Content-Type") or "text/plain"}
                answer = httpx.request(
                    self.command, server_url + path, headers=headers, content=body, timeout=120
                )
                kept = {"Content-Type", "Content-Security-Policy", "X-Content-Type-Options"}
                self._answer(
                    answer.status_code,
                    answer.content,
                    {name: answer.headers[name] for name in kept if name in answer.headers},
                )

        def _answer(
            self, status: int, content: bytes, headers: dict[str, str] | None = None
        ) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    gate = Gate(f"http://127.0.0.1:{proxy.server_port}{PREFIX}")
    thread = Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield gate
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()

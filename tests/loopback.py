"""Small servers on loopback that stand for somebody else's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class Handler(BaseHTTPRequestHandler):
    """What they share: a body to read, an answer to send, and no log."""

    protocol_version = "HTTP/1.1"

    def body(self) -> bytes:
        """All that the client sent."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(
        self, status: int, content: bytes | str = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a whole answer."""
        content = content.encode() if isinstance(content, str) else content
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def listening(handler: type[Handler]) -> Iterator[str]:
    """Serve on a free port; yields the address without a path."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()

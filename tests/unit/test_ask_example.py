"""examples/ask.py says in one line what is wrong, whatever it meets."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

ASK = Path(__file__).parents[2] / "examples" / "ask.py"


class StockServer(BaseHTTPRequestHandler):
    """As far as the example looks: a server of OpenAI's API that knows nothing of pruning."""

    def do_GET(self) -> None:
        found = self.path == "/v1/models"
        model = {"id": "m", "object": "model", "created": 0, "owned_by": "nobody"}
        body = {"object": "list", "data": [model]} if found else {"detail": "Not Found"}
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def stock_server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), StockServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def said(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, ASK, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_a_missing_picture_is_named() -> None:
    assert said("nope.png", "What is this?").startswith("no picture nope.png; ")


def test_no_server_is_told_how_to_start_one() -> None:
    address = "http://127.0.0.1:9/v1"
    assert said("--server", address) == f"no server at {address}; start one with `make serve`\n"


def test_an_address_without_v1_is_told_so(stock_server: str) -> None:
    assert "the address ends in /v1" in said("--server", stock_server)


def test_a_server_without_pruning_is_told_so(stock_server: str) -> None:
    assert "does not prune; start it with `make serve`" in said("--server", f"{stock_server}/v1")

"""examples/ask.py says in one line what is wrong, whatever it meets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loopback import Handler, listening

MODEL = {"id": "m", "object": "model", "created": 0, "owned_by": "nobody"}
JSON = {"Content-Type": "application/json"}
ASK = Path(__file__).parents[2] / "examples" / "ask.py"


class StockServer(Handler):
    """As far as the example looks: a server of OpenAI's API that knows nothing of pruning."""

    def do_GET(self) -> None:
        found = self.path == "/v1/models"
        body = {"object": "list", "data": [MODEL]} if found else {"detail": "Not Found"}
        self.answer(200 if found else 404, json.dumps(body), JSON)


@pytest.fixture(scope="module")
def stock_server() -> Iterator[str]:
    with listening(StockServer) as url:
        yield url


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


def test_a_refusal_is_shown_in_one_line() -> None:
    class Strict(Handler):
        """A server that prunes, and does not like what it is asked."""

        def do_GET(self) -> None:
            self.answer(200, json.dumps({"object": "list", "data": [MODEL]}), JSON)

        def do_POST(self) -> None:
            self.body()
            error = {"message": "retention must be in (0, 1], got 7.0"}
            self.answer(400, json.dumps({"error": error}), JSON)

    with listening(Strict) as url:
        words = said("--server", f"{url}/v1", "--retention", "7")
    assert words.startswith(f"{url}/v1 answered 400: ")
    assert "retention must be in (0, 1], got 7.0" in words

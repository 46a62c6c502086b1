"""The address and the request that a start prints."""

from __future__ import annotations

import json
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest

from server.greeting import address_of, example_request

ROOT = Path(__file__).parents[3]


def options(**given: object) -> Namespace:
    return Namespace(**{"host": None, "port": 8000, "uds": None, "ssl_certfile": None, **given})


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"host": "0.0.0.0", "port": 9000}, "http://127.0.0.1:9000"),
        ({"host": "::1"}, "http://[::1]:8000"),
        ({"host": "localhost", "ssl_certfile": "x"}, "https://localhost:8000"),
    ],
)
def test_the_address_is_one_that_a_client_here_can_use(given: dict, address: str) -> None:
    assert address_of(options(**given)) == address


@pytest.mark.parametrize("in_checkout", [True, False])
def test_the_request_is_whole_wherever_the_server_was_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_checkout: bool
) -> None:
    folder = ROOT if in_checkout else tmp_path
    monkeypatch.chdir(folder)
    lines = example_request("http://127.0.0.1:8000", "some-model", has_key=False)
    # A shell fills in the picture as it would for curl.
    script = "\n".join(["cat <<JSON", *lines[1:]])
    body = json.loads(subprocess.check_output(["sh", "-c", script], cwd=folder))
    assert (body["model"], body["retention"]) == ("some-model", 0.111)
    picture, question = body["messages"][0]["content"]
    assert picture["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert question["text"].endswith("?")


def test_a_server_with_a_key_says_where_it_goes() -> None:
    first = example_request("http://127.0.0.1:8000", "m", has_key=True)[0]
    assert "-H 'Authorization: Bearer YOUR-KEY'" in first

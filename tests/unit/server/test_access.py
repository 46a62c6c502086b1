"""The doors of the server: which paths ask for the key, and how large a body may be."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from server import access
from server.launcher import make_parser
from server.refusals import RequestSizeLimit

KEY = {"Authorization": "Bearer open-sesame"}


def app_with(api_key: list[str] | None) -> FastAPI:
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def answer(path: str, body: Any = None) -> str:
        return path

    access.install(app, Namespace(api_key=api_key))
    return app


def test_of_all_routes_of_the_server_only_the_open_ones_need_no_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.entrypoints.launchers.app import build_app

    monkeypatch.setenv("VLLM_PLUGINS", "msdg")
    app = build_app(make_parser().parse_args(["--api-key", "open-sesame"]), ("generate",))
    client = TestClient(app, raise_server_exceptions=False)
    routes: list[Any] = app.routes
    answers = {
        (method, route.path): client.request(method, route.path).status_code
        for route in routes
        for method in getattr(route, "methods", None) or ()
        if method not in ("HEAD", "OPTIONS")
    }
    assert ("POST", "/invocations") in answers
    assert ("GET", "/v1/pruning") in answers
    open_paths = {path for (_, path), status in answers.items() if status != 401}
    assert open_paths == access.OPEN_PATHS | {"/playground/{name:path}"}


@pytest.mark.parametrize("path", ["/v1/models", "/invocations", "/tokenize", "/docs", "/new", "//"])
def test_a_path_needs_the_key_unless_it_is_named_open(path: str) -> None:
    client = TestClient(app_with(["open-sesame"]))
    assert client.get(path).status_code == 401
    assert client.get(path, headers={"Authorization": "Bearer other"}).status_code == 401
    assert client.get(path, headers=KEY).status_code == 200


@pytest.mark.parametrize("path", ["/playground", "/playground/app.js"])
def test_the_page_itself_needs_no_key(path: str) -> None:
    client = TestClient(app_with(["open-sesame"]))
    assert client.get(path).status_code == 200
    assert client.get("/playgrounds").status_code == 401


@pytest.mark.parametrize("path", ["/health", "/ping", "/metrics"])
def test_probes_and_scrapers_need_no_key(path: str) -> None:
    assert TestClient(app_with(["open-sesame"])).get(path).status_code == 200


def test_without_a_key_everything_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert TestClient(app_with(None)).get("/v1/models").status_code == 200


def test_the_variable_counts_as_the_option_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "open-sesame")
    client = TestClient(app_with(None))
    assert client.post("/invocations").status_code == 401
    assert client.post("/invocations", headers=KEY).status_code == 200


@pytest.fixture(scope="module")
def limited() -> FastAPI:
    app = FastAPI()

    @app.post("/")
    async def answer(body: dict[str, str]) -> int:
        return len(body["text"])

    app.add_middleware(RequestSizeLimit, max_mb=1)
    return app


def body_of(num_bytes: int) -> dict[str, str]:
    return {"text": "x" * (num_bytes - len('{"text":""}'))}


def test_a_body_up_to_the_limit_is_read(limited: FastAPI) -> None:
    answer = TestClient(limited).post("/", json=body_of(1_000_000))
    assert answer.json() == 1_000_000 - 11


def test_a_larger_body_is_refused_in_openais_shape(limited: FastAPI) -> None:
    answer = TestClient(limited).post("/", json=body_of(1_000_001))
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == 413
    assert "1 MB" in answer.json()["error"]["message"]


def test_a_body_without_a_length_is_read_no_further_than_the_limit(limited: FastAPI) -> None:
    pieces = iter([{"type": "http.request", "body": b"x" * 300_000, "more_body": True}] * 9)
    sent: list[Any] = []

    async def receive() -> Any:
        return next(pieces)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}
    asyncio.run(limited(scope, receive, send))
    assert sent[0]["status"] == 413
    assert len(list(pieces)) == 5

"""What a client sees while the server stops, and of a 503."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from msdg_vllm.console import PROBE_PATHS
from server.shutdown import Availability, Traffic

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def client_of(
    traffic: Traffic, answer: Callable[[Request], Awaitable[Response]]
) -> httpx.AsyncClient:
    paths = ("/v1/chat/completions", *PROBE_PATHS)
    app = Starlette(routes=[Route(path, answer, methods=["GET", "POST"]) for path in paths])
    transport = httpx.ASGITransport(Availability(app, traffic))
    return httpx.AsyncClient(transport=transport, base_url="http://server")


@pytest.mark.parametrize(("status", "headers"), [(503, {}), (503, {"Retry-After": "9"}), (200, {})])
async def test_every_503_says_when_to_try_again(status: int, headers: dict[str, str]) -> None:
    async def answer(_: Request) -> Response:
        return Response(status_code=status, headers=headers)

    async with client_of(Traffic(), answer) as client:
        said = (await client.post("/v1/chat/completions")).headers.get("Retry-After")
    assert said == (headers.get("Retry-After", "1") if status == 503 else None)


async def test_a_stopping_server_refuses_requests_and_answers_probes() -> None:
    async def answer(_: Request) -> Response:
        return Response()

    traffic = Traffic()
    traffic.draining = True
    async with client_of(traffic, answer) as client:
        refused = await client.post("/v1/chat/completions")
        assert refused.status_code == 503
        assert refused.headers["Retry-After"] == "1"
        assert refused.json()["error"].keys() == {"message", "type", "param", "code"}
        assert {(await client.get(path)).status_code for path in PROBE_PATHS} == {200}


async def test_requests_are_waited_for_and_probes_are_not() -> None:
    traffic, ending = Traffic(), asyncio.Event()

    async def answer(request: Request) -> Response:
        if request.method == "POST":
            await ending.wait()
        assert traffic.in_flight == 1
        return Response()

    async with client_of(traffic, answer) as client:
        running = asyncio.create_task(client.post("/v1/chat/completions"))
        await asyncio.sleep(0.05)
        await client.get("/health/ready")
        assert not await asyncio.to_thread(traffic.wait, 0.05)
        ending.set()
        assert await asyncio.to_thread(traffic.wait, 5)
        await running


def test_a_stop_during_the_start_ends_a_process_that_goes_on_waiting() -> None:
    code = """
import os, signal, types
from server import shutdown

shutdown._START_SECONDS = 0.2
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append("interrupted"))
entry = types.SimpleNamespace(setup_server=lambda port: port + 1)
shutdown.guard_start(entry)
assert entry.setup_server(7) == 8
os.kill(os.getpid(), signal.SIGTERM)
print(*heard, flush=True)
while True:
    signal.pause()
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout) == (130, "interrupted\n")

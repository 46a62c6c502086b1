"""Faults that end a server or freeze it: stops with live streams, kills, a worker that hangs."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from benchmarks.chaos.outcome import Outcome
from benchmarks.chaos.traffic import CHAT, chat, client_of, image_part
from benchmarks.shared.server_process import Started

STREAMS = 4
STOP_SECONDS = 25
"""The launcher's own default for `--shutdown-timeout`."""
EARLY_STOP_SECONDS = 15
"""What docs/reliability.md allows a stop beside that."""


def processes_of(pid: int) -> list[tuple[int, str]]:
    """Return the living processes of a server's group and what each is called."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            name = (folder / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
        except OSError:
            continue
        if int(fields[2]) == pid and fields[0] != "Z":
            found.append((int(folder.name), name))
    return found


def left_of(pid: int, seconds: float = 10) -> list[tuple[int, str]]:
    """Return what is still there of an ended server after a while; Python's helpers come last."""
    deadline = time.monotonic() + seconds
    while (left := processes_of(pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def named(pid: int, part: str) -> int:
    """Return the process of a server whose title contains `part`."""
    for found, name in processes_of(pid):
        if part in name:
            return found
    raise LookupError(f"the server has no process with {part!r} in its title")


async def _stream(client: httpx.AsyncClient, body: dict[str, object], opened: list[int]) -> str:
    """Read a stream to its end and say which end: done, an error, or a cut."""
    last = ""
    try:
        async with client.stream("POST", CHAT, json=body) as answer:
            async for line in answer.aiter_lines():
                if line and not last:
                    opened.append(1)
                last = line or last
    except httpx.HTTPError:
        return "cut"
    if "[DONE]" in last:
        return "done"
    return "error" if "error" in last else "cut"


async def _end(
    started: Started, model: str, act: Callable[[Started], None], seconds: float
) -> tuple[list[str], float, list[str]]:
    """Act while streams are open; return their ends, the seconds to the end, what was noticed."""
    noticed: list[str] = []
    async with client_of(started.url) as client:
        fields = {"max_tokens": 1500, "ignore_eos": True, "stream": True}
        bodies = [chat(model, [image_part(i)], retention=0.111, **fields) for i in range(STREAMS)]
        opened: list[int] = []
        streams = [asyncio.create_task(_stream(client, body, opened)) for body in bodies]
        deadline = time.monotonic() + 60
        while len(opened) < STREAMS and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        start = time.monotonic()
        act(started)
        while started.process.poll() is None and time.monotonic() - start < seconds:
            await asyncio.sleep(0.2)
            try:
                ready = (await client.get("/health/ready", timeout=2)).status_code
                new = (await client.post(CHAT, json=chat(model), timeout=5)).status_code
                noticed.append(f"ready {ready}, new {new}")
            except httpx.HTTPError:
                continue
        gone = time.monotonic() - start
        ends = await asyncio.wait_for(asyncio.gather(*streams), 30)
    return ends, gone, noticed


def _outcome(
    name: str, started: Started, model: str, act: Callable[[Started], None], allowed: float
) -> Outcome:
    """The server must be gone in time, with all its processes and with every stream told."""
    ends, seconds, noticed = asyncio.run(_end(started, model, act, allowed + 30))
    code = started.process.poll()
    left = left_of(started.process.pid)
    is_stop = name.startswith("SIG")
    problems = []
    if code is None:
        problems.append("still running")
    elif (code == 0) != is_stop:
        problems.append(f"exit code {code}")
    if seconds > allowed:
        problems.append(f"took {seconds:.0f} s")
    if left:
        problems.append(f"{len(left)} processes left")
    if is_stop and "cut" in ends:
        problems.append(f"{ends.count('cut')} streams cut")
    if is_stop and (bad := [text for text in noticed if text not in _DURING_A_STOP]):
        problems.append(f"during the stop: {bad[0]}")
    return Outcome(name, not problems, seconds, "; ".join(problems) or f"streams: {set(ends)}")


_DURING_A_STOP = {"ready 503, new 503"}


def stop(started: Started, model: str) -> Outcome:
    """SIGTERM with live streams."""
    return _outcome("SIGTERM", started, model, _send(signal.SIGTERM), STOP_SECONDS + 10)


def interrupt(started: Started, model: str) -> Outcome:
    """Ctrl-C: SIGINT to all processes of the server."""

    def act(server: Started) -> None:
        os.killpg(server.process.pid, signal.SIGINT)

    return _outcome("SIGINT to the group", started, model, act, STOP_SECONDS + 10)


def kill_worker(started: Started, model: str) -> Outcome:
    """A worker is killed, as by the kernel when memory is short."""

    def act(server: Started) -> None:
        os.kill(named(server.process.pid, "Worker"), signal.SIGKILL)

    return _outcome("worker killed", started, model, act, 30)


def kill_engine(started: Started, model: str) -> Outcome:
    """The engine is killed."""

    def act(server: Started) -> None:
        os.kill(named(server.process.pid, "EngineCore"), signal.SIGKILL)

    return _outcome("engine killed", started, model, act, 30)


def kill_api(started: Started, model: str) -> Outcome:
    """The API process is killed; nothing may outlive it."""
    return _outcome("API process killed", started, model, _send(signal.SIGKILL), 10)


def stop_early(started: Started, seconds: float) -> Outcome:
    """SIGTERM to all processes of a server that has been starting for some seconds."""
    time.sleep(seconds)
    begin = time.monotonic()
    os.killpg(started.process.pid, signal.SIGTERM)
    while started.process.poll() is None and time.monotonic() - begin < 2 * EARLY_STOP_SECONDS:
        time.sleep(0.1)
    took = time.monotonic() - begin
    left = left_of(started.process.pid)
    survived = took <= EARLY_STOP_SECONDS and not left
    note = f"exit code {started.process.poll()} after {seconds:.0f} s of start; {len(left)} left"
    return Outcome("SIGTERM during the start", survived, took, note)


def freeze(started: Started, model: str) -> Outcome:
    """A worker is stopped (SIGSTOP); the probes must notice, and forget it when it goes on."""
    worker = named(started.process.pid, "Worker")

    def probe(path: str) -> int:
        return httpx.get(f"{started.url}{path}", timeout=5).status_code

    def wait(path: str, status: int, seconds: float) -> float:
        start = time.monotonic()
        while probe(path) != status and time.monotonic() - start < seconds:
            time.sleep(0.5)
        return time.monotonic() - start

    os.kill(worker, signal.SIGSTOP)
    unready, dead = wait("/health/ready", 503, 30), wait("/health/live", 503, 90)
    os.kill(worker, signal.SIGCONT)
    back = max(wait("/health/ready", 200, 30), wait("/health/live", 200, 30))
    served = httpx.post(f"{started.url}{CHAT}", json=chat(model), timeout=60).status_code
    survived = unready < 30 and dead < 90 and back < 30 and served == 200
    note = f"not ready after {unready:.0f} s, not alive after {unready + dead:.0f} s"
    note += f"; well {back:.0f} s after it went on"
    return Outcome("worker frozen", survived, unready + dead + back, note)


def _send(number: signal.Signals) -> Callable[[Started], None]:
    def act(server: Started) -> None:
        process: subprocess.Popen[bytes] = server.process
        process.send_signal(number)

    return act


ENDINGS = {
    "stop": stop,
    "interrupt": interrupt,
    "kill-worker": kill_worker,
    "kill-engine": kill_engine,
    "kill-api": kill_api,
}
"""Faults by name; each gets a server of its own."""

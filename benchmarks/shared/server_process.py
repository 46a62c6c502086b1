"""Servers of benchmarks and tests: started as subprocesses on loopback, and always stopped."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import requests

from benchmarks.shared.provenance import ROOT

PRUNING_SERVER = "server"
STOCK_SERVER = "vllm.entrypoints.openai.api_server"
START_SECONDS = 900
STOP_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Started:
    """A server that was started."""

    url: str
    process: subprocess.Popen[bytes]


class StartError(Exception):
    """A server that did not start, with the end of its log."""


@contextmanager
def running(
    module: str,
    options: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    start_seconds: float = START_SECONDS,
) -> Iterator[Started]:
    """Start `python -m module`, wait until it is healthy, yield it; stop it at the end.

    It is stopped whatever ends the block, SIGTERM included.
    """
    with starting(module, options, log, environment) as started:
        _await_health(started.url, started.process, log, start_seconds)
        yield started


@contextmanager
def starting(
    module: str, options: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Started]:
    """`running`, for those who do not wait until it is healthy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", module, "--host=127.0.0.1", f"--port={port}", *options]
    log.parent.mkdir(parents=True, exist_ok=True)
    with _terminated_by_exception(), log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            # A group of its own: Ctrl-C reaches us alone, and no child of it is forgotten.
            start_new_session=True,
        )
        try:
            yield Started(f"http://127.0.0.1:{port}", process)
        finally:
            _stop(process)


def stock_environment() -> dict[str, str]:
    """The environment in which vLLM loads no plugin, so that it is vLLM and nothing else."""
    return {"VLLM_PLUGINS": ""}


def _await_health(
    url: str, process: subprocess.Popen[bytes], log: Path, start_seconds: float
) -> None:
    deadline = time.monotonic() + start_seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if requests.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except requests.RequestException:
            pass
        time.sleep(0.25)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
    state = "did not answer in time" if process.poll() is None else "ended"
    raise StartError(f"the server {state}; the end of {log}:\n{tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    # The group outlives its leader as long as a child of it does.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def _terminated_by_exception() -> Iterator[None]:
    """Turn SIGTERM into an exception inside, so that what is running gets cleaned up."""

    def stop(*_: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

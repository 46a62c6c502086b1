"""`msdg-vllm serve` as a person runs it: the command, its screen, Ctrl-C."""

from __future__ import annotations

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

import httpx

from tests.server.running import START_SECONDS

COMMAND = Path(sys.prefix) / "bin" / "msdg-vllm"
END_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Terminal:
    """A server and everything it has printed."""

    url: str
    process: subprocess.Popen[bytes]
    screen: Path

    @property
    def lines(self) -> list[str]:
        """What is on the screen."""
        return self.screen.read_text(errors="replace").splitlines()

    def press_control_c(self) -> int:
        """Interrupt it as a terminal does, the whole group; return its exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(END_SECONDS)


@contextmanager
def serving(
    model: str, folder: Path, environment: Mapping[str, str], options: Sequence[str] = ()
) -> Iterator[Terminal]:
    """Run the command in `folder`, wait for the last line of its greeting, end it at last."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    screen = folder / "screen.txt"
    with screen.open("wb") as output:
        process = subprocess.Popen(
            [COMMAND, "serve", model, "--host=127.0.0.1", f"--port={port}", *options],
            cwd=folder,
            env=dict(environment),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A shell's background job, which the tests may be, ignores Ctrl-C and hands that on.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    terminal = Terminal(f"http://127.0.0.1:{port}", process, screen)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not (terminal.lines and terminal.lines[-1].startswith("Ctrl-C")):
            assert process.poll() is None, screen.read_text(errors="replace")
            assert time.monotonic() < deadline, screen.read_text(errors="replace")
            time.sleep(0.25)
        assert httpx.get(f"{terminal.url}/health", timeout=30).status_code == 200
        yield terminal
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

"""The command line says what is wrong and what to do."""

import socket
import subprocess
import sys

import pytest

from benchmarks.shared.provenance import ROOT


def _quality(*arguments):
    command = [sys.executable, "-m", "benchmarks.quality", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def unused_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_server_that_is_down_is_one_sentence(unused_port):
    url = f"http://127.0.0.1:{unused_port}"
    done = _quality("run", "--server", url)
    assert done.returncode == 1
    assert done.stderr == (
        f"no server at {url} ([Errno 111] Connection refused); start one with `make serve` or "
        "`python -m server --model ...`, or name the one that is up\n"
    )
    assert "Traceback" not in done.stderr


def test_a_retention_that_is_none_is_refused():
    done = _quality("run", "--retentions", "3")
    assert done.returncode == 2
    assert "--retentions" in done.stderr

"""A benchmark's server never outlives the benchmark."""

import os
import signal
import time
from pathlib import Path

import pytest
import requests

from benchmarks.shared.server_process import StartError, running

HEALTHY = "tests.unit.benchmarks.shared.healthy"


def is_alive(pid: int) -> bool:
    try:
        # A process that has ended but was not waited for is a zombie, state Z.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGINT])
def test_it_stops_with_all_its_children_whatever_ends_the_block(
    tmp_path: Path, number: signal.Signals | None
) -> None:
    children, url = tmp_path / "children", ""
    try:
        with running(HEALTHY, [f"--children={children}"], tmp_path / "log") as started:
            url = started.url
            assert requests.get(f"{url}/health", timeout=5).status_code == 200
            child = int(children.read_text())
            assert is_alive(child)
            if number is not None:
                os.kill(os.getpid(), number)
    except (SystemExit, KeyboardInterrupt):
        assert number is not None
    deadline = time.monotonic() + 10  # the kernel kills when it comes to it
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{url}/health", timeout=5)


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(StartError, match=r"No module named benchmarks\.nowhere"),
        running("benchmarks.nowhere", [], tmp_path / "log"),
    ):
        pass

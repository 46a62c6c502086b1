"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

PARENT = """
import multiprocessing, os, time
from msdg_vllm.engine.parent import die_with_parent

def child(pipe):
    die_with_parent()
    pipe.send(os.getpid())
    time.sleep(60)

if __name__ == "__main__":
    die_with_parent()  # not started by multiprocessing: stays as it is
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    context.Process(target=child, args=(sender,)).start()
    print(receiver.recv(), flush=True)
    time.sleep(60)
"""


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_child_dies_with_its_killed_parent(tmp_path: object) -> None:
    script = os.path.join(str(tmp_path), "parent.py")
    with open(script, "w") as file:
        file.write(PARENT)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_running(child)
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)

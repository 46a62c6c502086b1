"""Processes that end with the one that started them.

Fills a gap: when an API process is killed, vLLM's engine and its workers live on, and keep the
memory of the device.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, if `multiprocessing` started it."""
    parent = multiprocessing.parent_process()
    # Behind a fork server the real parent is that server, which lives on.
    if sys.platform != "linux" or parent is None or parent.pid != os.getppid():
        return
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0 and (
        parent.pid != os.getppid()
    ):
        os._exit(1)  # it ended before Linux was asked

"""What all API server processes know together about load, in one piece of shared memory."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NUM_TERMS = 3
"""What work consists of: requests, computed prompt tokens, encoder tokens."""

LOAD_FILE_VARIABLE = "MSDG_LOAD_FILE"
"""Where the launcher tells all API processes which file they share."""

MAX_PROCESSES = 64
NUM_MEASURED = 128
NUM_STICKY = 4096
_STICKY_PROBES = 8


Doubles = ctypes.Array[ctypes.c_double]


def _doubles(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_double) for name in names]


class Slot(ctypes.Structure):
    """What one API process has sent to the engine and not yet seen the first token of."""

    pid: int
    work: Doubles
    _fields_ = [("pid", ctypes.c_int64), ("work", ctypes.c_double * NUM_TERMS)]


class Measurement(ctypes.Structure):
    """A first token: when it came, how long it took, and how much longer than predicted."""

    time: float
    seconds: float
    lateness: float
    _fields_ = _doubles("time", "seconds", "lateness")


class Sticky(ctypes.Structure):
    """The retention that an image was given, and when it was last asked for."""

    identity: int
    retention: float
    used: float
    _fields_ = [("identity", ctypes.c_uint64), *_doubles("retention", "used")]


class Load(ctypes.Structure):
    """The state of the controller; all zero is its start.

    Attributes:
        level: Position of the level on the ladder, 0 at the ceiling.
        raised: When the level last moved, or was last kept from rising.
        rho: Share of the time that work may take; 0 before the first decision.
        judged: When rho was last corrected.
        started: When the first request came.
        fixed, prunable: Seconds of work of recent requests, fading away.
        faded: When the two were last brought up to date.
        last_first_token: When the engine last finished a prompt.
        group_gap, group_work: First tokens that came together: their time and their work.
        gram, moment: Sums of the least squares that the costs are learnt by.
        num_measured: First tokens measured so far.
        checked: When it was last looked whether the processes of the slots live.
    """

    level: int
    raised: float
    rho: float
    judged: float
    started: float
    fixed: float
    prunable: float
    faded: float
    last_first_token: float
    group_gap: float
    group_work: Doubles
    gram: Doubles
    moment: Doubles
    num_measured: int
    checked: float
    slots: ctypes.Array[Slot]
    measured: ctypes.Array[Measurement]
    sticky: ctypes.Array[Sticky]
    _fields_ = [
        ("level", ctypes.c_int64),
        *_doubles("raised", "rho", "judged", "started", "fixed", "prunable", "faded"),
        *_doubles("last_first_token", "group_gap"),
        ("group_work", ctypes.c_double * NUM_TERMS),
        ("gram", ctypes.c_double * (NUM_TERMS * NUM_TERMS)),
        ("moment", ctypes.c_double * NUM_TERMS),
        ("num_measured", ctypes.c_int64),
        *_doubles("checked"),
        ("slots", Slot * MAX_PROCESSES),
        ("measured", Measurement * NUM_MEASURED),
        ("sticky", Sticky * NUM_STICKY),
    ]


def remembered(load: Load, identity: int, since: float) -> float | None:
    """Return the retention that an image was given, if it was asked for `since` a time."""
    for entry in _places(load, identity):
        if entry.identity == identity and entry.used > since:
            return float(entry.retention)
    return None


def remember(load: Load, identity: int, retention: float, now: float) -> None:
    """Note what an image was given, in the place of the one that was idle longest."""
    places = _places(load, identity)
    own = [entry for entry in places if entry.identity == identity]
    entry = own[0] if own else min(places, key=lambda place: place.used)
    entry.identity, entry.retention, entry.used = identity, retention, now


def _places(load: Load, identity: int) -> list[Sticky]:
    return [load.sticky[(identity + probe) % NUM_STICKY] for probe in range(_STICKY_PROBES)]


class SharedLoad:
    """A `Load` that every process sees which opens the same file, one at a time."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("r+b")
        self._memory = mmap.mmap(self._file.fileno(), ctypes.sizeof(Load))
        self._load = Load.from_buffer(self._memory)
        # A file lock keeps processes apart, not the threads of one.
        self._threads = threading.Lock()

    @staticmethod
    def create() -> Path:
        """Make the file, in memory where the system has a place for that."""
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        handle, name = tempfile.mkstemp(prefix="msdg-load-", dir=folder)
        os.truncate(handle, ctypes.sizeof(Load))
        os.close(handle)
        return Path(name)

    @contextmanager
    def locked(self) -> Iterator[Load]:
        """Hold the state; the system lets go of it for a process that dies."""
        with self._threads:
            yield from self._held()

    @contextmanager
    def locked_if_free(self) -> Iterator[Load | None]:
        """Hold the state unless this process holds it already; None then."""
        if not self._threads.acquire(blocking=False):
            yield None
            return
        try:
            yield from self._held()
        finally:
            self._threads.release()

    def _held(self) -> Iterator[Load]:
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield self._load
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

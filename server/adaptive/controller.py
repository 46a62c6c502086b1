"""The highest retention at which requests still get their first token in time."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from server.adaptive.costs import Costs, learn
from server.adaptive.state import (
    MAX_PROCESSES,
    NUM_MEASURED,
    NUM_TERMS,
    Load,
    Measurement,
    Slot,
    remember,
    remembered,
)

_LADDER = (1.0, 0.75, 0.5, 0.333, 0.222, 0.167, 0.111, 0.083, 0.056, 0.04, 0.028, 0.02, 0.01)
_RHO_START, _RHO_MIN, _RHO_MAX = 0.8, 0.5, 0.9
_RHO_DOWN, _RHO_UP = 0.04, 0.01
_MARGIN = 0.85  # a rung that takes less than this share of what is allowed may be climbed
# How much of the target the queue may take before images pay for it: a queue that is full at the
# start of a burst stays full to its end.
_QUEUE_SHARE = 0.5
_QUANTILE = 0.95
_ENOUGH_MEASURED = 8  # before that, a quantile says nothing

REASONS = ("level", "burst", "sticky", "floor")
"""Why an image got its retention: the level of the server, this moment's queue, what the image had
before, or because there is nothing lower."""


class LockedLoad(Protocol):
    """Whatever holds a `Load` and lends it to one caller at a time."""

    def locked(self) -> AbstractContextManager[Load]: ...

    def locked_if_free(self) -> AbstractContextManager[Load | None]: ...


@dataclass(frozen=True, slots=True)
class Image:
    """An image whose retention is open: who it is without its budget, and its tokens.

    `most` is how many of them are kept at most, whatever the retention.
    """

    identity: int
    num_tokens: int
    most: float = math.inf

    def num_kept(self, retention: float) -> float:
        """Return how many tokens are kept at a retention, before rounding."""
        return min(self.num_tokens * retention, self.most)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as the controller sees it.

    Attributes:
        fixed_tokens: Prompt tokens that nobody may take away: text, and images with a retention.
        encoder_tokens: Tokens that the vision encoder computes, whatever is kept of them.
        images: The images whose retention is open.
    """

    fixed_tokens: int
    encoder_tokens: int = 0
    images: Sequence[Image] = ()


@dataclass(slots=True)
class Reservation:
    """Work that was sent to the engine and whose first token is awaited."""

    work: tuple[float, ...]
    sent: float
    predicted: float
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class Decision:
    """What the controller decided about a request.

    Attributes:
        retentions: The fraction to keep of each image.
        reasons: One of `REASONS` for each image.
        reservation: To be given back with the first token, or when there will be none.
    """

    retentions: Sequence[float]
    reasons: Sequence[str]
    reservation: Reservation


@dataclass(frozen=True, slots=True)
class Status:
    """What operators see: the level, what waits, and how the last first tokens came."""

    level: float
    backlog_seconds: float
    rho: float
    measured_p95_seconds: float
    num_measured: int
    is_overloaded: bool


def ladder(floor: float, ceiling: float) -> tuple[float, ...]:
    """Return the retentions that may be given out, the ceiling first and the floor last."""
    between = [rung for rung in _LADDER if floor < rung < ceiling]
    return tuple(dict.fromkeys((ceiling, *between, floor)))


class Controller:
    """Decides retentions for all requests of the processes that share a `Load`."""

    def __init__(self, load: LockedLoad, *, target: float, floor: float, ceiling: float) -> None:
        self._load = load
        self.target = target
        self.rungs = ladder(floor, ceiling)
        self._horizon = max(4 * target, 2.0)
        self._sticky_seconds = max(60.0, 30 * target)
        self._pid = os.getpid()
        self._abandoned: deque[Reservation] = deque()

    def arrive(self, arrival: Arrival, now: float) -> Decision:
        """Decide about a request, and count it as waiting until its reservation is closed."""
        with self._load.locked() as load:
            self._release_abandoned(load)
            self._fade(load, now)
            costs = Costs(load)
            fixed, encoder = arrival.fixed_tokens, arrival.encoder_tokens
            prunable = sum(image.num_kept(1.0) for image in arrival.images)
            load.fixed += costs.seconds(1, fixed, encoder)
            load.prunable += costs.seconds(0, prunable, 0)
            level = self._move_level(load, now)
            lateness = self._lateness(load, now)
            wait = self._wait(load, costs, now)
            rung = level
            while rung < len(self.rungs) - 1:
                kept = sum(image.num_kept(self.rungs[rung]) for image in arrival.images)
                service = costs.seconds(1, fixed + kept, encoder)
                if wait / _QUEUE_SHARE + service + lateness <= self.target:
                    break
                rung += 1
            retentions, reasons = [], []
            for image in arrival.images:
                before = remembered(load, image.identity, now - self._sticky_seconds)
                retention = self.rungs[rung] if before is None else before
                remember(load, image.identity, retention, now)
                retentions.append(retention)
                reasons.append("sticky" if before is not None else self._reason(rung, level))
            given = zip(arrival.images, retentions, strict=True)
            kept = sum(image.num_kept(retention) for image, retention in given)
            work = (1.0, fixed + kept, float(encoder))
            self._add(load, work, 1)
            predicted = wait + costs.seconds(*work)
        return Decision(retentions, reasons, Reservation(work, now, predicted))

    def first_token(self, reservation: Reservation, now: float, cached_tokens: int = 0) -> None:
        """Learn from a first token; tokens found in a cache were not computed."""
        if not reservation.is_open:
            return
        reservation.is_open = False
        requests, tokens, encoder_tokens = reservation.work
        taken = now - reservation.sent
        with self._load.locked() as load:
            self._add(load, reservation.work, -1)
            computed = (requests, max(tokens - cached_tokens, 0.0), encoder_tokens)
            learn(load, computed, reservation.sent, now)
            place = load.measured[load.num_measured % NUM_MEASURED]
            place.time, place.seconds, place.lateness = now, taken, taken - reservation.predicted
            load.num_measured += 1
            self._judge(load, now)

    def release(self, reservation: Reservation) -> None:
        """Give up waiting: the request failed, or its client went away."""
        if reservation.is_open:
            with self._load.locked() as load:
                self._close(load, reservation)

    def abandon(self, reservation: Reservation) -> None:
        """Release what was forgotten; may be called in the middle of any other call.

        The garbage collector does that: a call that it interrupts may hold the load.
        """
        self._abandoned.append(reservation)
        with self._load.locked_if_free() as load:
            if load is not None:
                self._release_abandoned(load)

    def status(self, now: float) -> Status:
        """Look at the load without changing what is decided."""
        with self._load.locked() as load:
            self._release_abandoned(load)
            self._fade(load, now)
            level = self._move_level(load, now)
            recent = self._recent(load, now)
            p95 = _quantile([entry.seconds for entry in recent])
            at_floor = level == len(self.rungs) - 1
            return Status(
                level=self.rungs[level],
                backlog_seconds=self._wait(load, Costs(load), now),
                rho=load.rho or _RHO_START,
                measured_p95_seconds=p95,
                num_measured=load.num_measured,
                is_overloaded=at_floor and len(recent) >= _ENOUGH_MEASURED and p95 > self.target,
            )

    def _reason(self, rung: int, level: int) -> str:
        if rung == len(self.rungs) - 1 and rung > 0:
            return "floor"
        return "burst" if rung > level else "level"

    def _fade(self, load: Load, now: float) -> None:
        if not load.started:
            load.started = load.faded = load.raised = load.judged = now
            load.last_first_token = now
            load.rho = _RHO_START
        factor = math.exp(-max(now - load.faded, 0.0) / self._horizon)
        load.fixed *= factor
        load.prunable *= factor
        load.faded = now

    def _move_level(self, load: Load, now: float) -> int:
        """Go down as far as work asks for, at once; go up a rung after each two quiet targets."""
        seen = self._horizon * (1 - math.exp(-(now - load.started) / self._horizon))
        # Early on the sums hold little time; a single request must not look like a flood.
        seen = max(seen, self.target)

        def share(rung: int) -> float:
            return float(load.fixed + self.rungs[rung] * load.prunable) / seen

        last = len(self.rungs) - 1
        level = min(load.level, last)
        while level < last and share(level) > load.rho:
            level += 1
            load.raised = now
        while level > 0 and now - load.raised >= 2 * self.target:
            if share(level - 1) > load.rho * _MARGIN:
                load.raised = now
                break
            level -= 1
            load.raised += 2 * self.target
        load.level = level
        return level

    def _judge(self, load: Load, now: float) -> None:
        """Correct how much work is allowed by how the last first tokens came."""
        if now - load.judged < 2 * self.target:
            return
        load.judged = now
        recent = self._recent(load, now)
        if len(recent) < _ENOUGH_MEASURED:
            return
        p95 = _quantile([entry.seconds for entry in recent])
        if p95 > self.target:
            load.rho = max(load.rho - _RHO_DOWN, _RHO_MIN)
        elif p95 < 0.8 * self.target:
            load.rho = min(load.rho + _RHO_UP, _RHO_MAX)

    def _wait(self, load: Load, costs: Costs, now: float) -> float:
        """Seconds until the engine has done what it was sent."""
        self._drop_dead(load, now)
        waiting = [slot.work for slot in load.slots if slot.pid]
        requests, tokens, encoder_tokens = (
            sum(work[term] for work in waiting) for term in range(NUM_TERMS)
        )
        if requests < 0.5:
            return 0.0
        backlog = costs.seconds(requests, tokens, encoder_tokens)
        # The request at the head is partly done.
        head = backlog / requests
        return backlog - min(max(now - load.last_first_token, 0.0), head)

    def _recent(self, load: Load, now: float) -> list[Measurement]:
        since = now - max(10 * self.target, 5.0)
        number = min(load.num_measured, NUM_MEASURED)
        return [entry for entry in load.measured[:number] if entry.time >= since]

    def _lateness(self, load: Load, now: float) -> float:
        recent = self._recent(load, now)
        if len(recent) < _ENOUGH_MEASURED:
            return 0.0
        # Beyond half of the target it would forbid everything, and teach nothing.
        return min(max(_quantile([entry.lateness for entry in recent]), 0.0), self.target / 2)

    def _add(self, load: Load, work: Sequence[float], sign: int) -> None:
        slot = self._slot(load)
        for term in range(NUM_TERMS):
            slot.work[term] = max(slot.work[term] + sign * work[term], 0.0)

    def _release_abandoned(self, load: Load) -> None:
        while self._abandoned:
            self._close(load, self._abandoned.popleft())

    def _close(self, load: Load, reservation: Reservation) -> None:
        if reservation.is_open:
            reservation.is_open = False
            self._add(load, reservation.work, -1)

    def _slot(self, load: Load) -> Slot:
        for slot in load.slots:
            if slot.pid in (self._pid, 0):
                slot.pid = self._pid
                return slot
        return load.slots[self._pid % MAX_PROCESSES]

    def _drop_dead(self, load: Load, now: float) -> None:
        """Forget, once a second, what processes waited for that are no more."""
        if now - load.checked < 1:
            return
        load.checked = now
        for slot in load.slots:
            if slot.pid and slot.pid != self._pid and not _is_alive(slot.pid):
                slot.pid, slot.work[:] = 0, [0.0] * NUM_TERMS


def _quantile(values: Sequence[float]) -> float:
    if not values:
        return 0.0
    return sorted(values)[min(int(_QUANTILE * len(values)), len(values) - 1)]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True

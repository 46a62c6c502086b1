"""Tensors kept in host memory, by key: bounded by bytes, least recently used out first.

All of the memory is taken at the start, pinned where a device reads it, so that copies never wait
and nothing else grows. What is kept and what is dropped follows from the sequence of calls alone:
workers that see the same calls keep the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

import torch

from msdg_vllm.methods import Mappable

# Copies between devices want it, and every type can be read from it.
_ALIGNMENT = 64


Value = TypeVar("Value", bound=Mappable)


class HostStore(Generic[Value]):
    """Values by key; what comes out is a copy that later calls do not touch."""

    def __init__(
        self, max_bytes: int, *, max_entries: int | None = None, pinned: bool = False
    ) -> None:
        # Models are built with their device as the default.
        self._memory = torch.empty(max_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self._max_entries = max_entries
        # Free extents as (start, end), ascending, never adjacent.
        self._holes: list[tuple[int, int]] = []
        self._entries: OrderedDict[Hashable, tuple[Value, int, int]] = OrderedDict()
        self.num_bytes = 0
        self.evictions = 0
        self.clear()

    @property
    def max_bytes(self) -> int:
        """Memory that was taken."""
        return len(self._memory)

    def __len__(self) -> int:
        return len(self._entries)

    def peek(self, key: Hashable) -> Value | None:
        """What is kept under a key, in host memory: only to see what there is of it."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def get(self, key: Hashable, device: torch.device) -> Value | None:
        """Start copying a value to a device, and mark it as used; None if it is not kept."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0].map(lambda tensor: tensor.to(device, non_blocking=True, copy=True))

    def put(self, key: Hashable, value: Value) -> None:
        """Start copying a value to the host, in place of what the key had.

        Others make room for it; a value larger than all of the memory is not kept.
        """
        sizes: list[int] = []

        def measured(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
            return tensor

        value.map(measured)
        self._drop(key)
        if (size := sum(sizes)) > self.max_bytes:
            return
        if self._max_entries is not None and len(self._entries) >= self._max_entries:
            self._evict()
        while (start := self._take(size)) is None:
            self._evict()
        place = start

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal place
            extent = self._memory[place : place + tensor.nbytes]
            place += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            host = extent.view(tensor.dtype).view(tensor.shape)
            host.copy_(tensor, non_blocking=True)
            return host

        self._entries[key] = (value.map(copied), start, start + size)
        self.num_bytes += size

    def clear(self) -> None:
        """Forget everything; the memory stays taken."""
        self._entries.clear()
        self._holes = [(0, self.max_bytes)] if self.max_bytes else []
        self.num_bytes = 0

    def _evict(self) -> None:
        self._drop(next(iter(self._entries)))
        self.evictions += 1

    def _take(self, size: int) -> int | None:
        """Take the first hole that is large enough."""
        for number, (start, end) in enumerate(self._holes):
            if end - start >= size:
                left = [(start + size, end)] if end - start > size else []
                self._holes[number : number + 1] = left
                return start
        return None if size else 0

    def _drop(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        _, start, end = entry
        self.num_bytes -= end - start
        if start == end:
            return
        place = bisect_left(self._holes, (start, end))
        before, behind = self._holes[:place], self._holes[place:]
        if before and before[-1][1] == start:
            start = before.pop()[0]
        if behind and behind[0][0] == end:
            end = behind.pop(0)[1]
        self._holes = [*before, (start, end), *behind]

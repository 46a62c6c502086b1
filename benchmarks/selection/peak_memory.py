"""How much memory a piece of code takes beside its inputs."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Tracks the bytes of the tensors made inside the block that are alive at once.

    Attributes:
        peak: The most bytes alive at any time, inputs not counted.
    """

    def __init__(self, *inputs: object) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        # References, so that no new tensor gets the address of an input.
        self._inputs: dict[int, StorageWeakRef] = {}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._note_inputs(inputs)

    def _note_inputs(self, tree: object) -> None:
        """Note the tensors that were not made inside the block."""
        for storage in map(_storage, _tensors(tree)):
            if storage.cdata not in self._alive:
                self._inputs[storage.cdata] = storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note_inputs((args, kwargs))
        result = func(*args, **(kwargs or {}))
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        for tensor in _tensors(result):
            storage = _storage(tensor)
            if storage.cdata not in self._inputs:
                self._alive[storage.cdata] = storage, tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _tensors(tree: object) -> Iterator[Tensor]:
    yield from (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))

"""A guard against operators that make a device wait for the host."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from msdg_vllm.core import grouping

# Operators whose result, or whose shape, the host must read from the device.
WAITING = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_numpy",
    "argwhere", "masked_select", "masked_scatter", "unique", "unique_dim", "unique_consecutive",
    "_unique", "_unique2", "bincount", "histc", "repeat_interleave", "one_hot", "tolist",
}  # fmt: skip
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class NoWaiting(TorchDispatchMode):
    """Fails on an operator that would make a GPU wait, or that moves data off its device.

    The CPU, which stands in for it, then takes no short cut that only a CPU may take.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __enter__(self) -> "NoWaiting":
        self._known_at_once = grouping.KNOWN_AT_ONCE
        grouping.KNOWN_AT_ONCE = ()
        super().__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        grouping.KNOWN_AT_ONCE = self._known_at_once
        super().__exit__(*reason)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket.__name__
        self.seen.add(packet)
        assert packet not in WAITING or func is torch.ops.aten.repeat_interleave.self_int, func
        assert torch.Tag.data_dependent_output not in func.tags, func
        assert torch.Tag.dynamic_output_shape not in func.tags or packet in INDEXING, func
        if packet in INDEXING:
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            assert not masks, f"{func} by a mask has a shape that the data decides"
        if packet in ("_to_copy", "copy_"):
            assert kwargs.get("device") in (None, args[0].device), f"{func} changes the device"
        return func(*args, **kwargs)

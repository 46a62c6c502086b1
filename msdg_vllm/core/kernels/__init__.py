"""The method's loops as device kernels (Triton): a handful of launches for any batch.

One switch: on the devices of `DEVICES` the kernels run, if Triton is installed and compiles them;
everywhere else, and after a failure, the torch code in the folder above does the same. Triton is
imported with the first kernel, never before.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

# Types of device that run the kernels: CUDA and ROCm go by one name.
DEVICES = {"cuda"}

# Up to here kernels work on a matrix of tokens by tokens.
MAX_PAIRED_TOKENS = 1024

# Types of states and tokens that kernels read; others are converted first.
READ = {torch.float32, torch.bfloat16, torch.float16}

_logger = logging.getLogger(__name__)
_failed: set[str] = set()


def run_on(device: torch.device) -> bool:
    """Whether the kernels run on a device, as far as is known."""
    is_meant = device.type in DEVICES and device.type not in _failed
    return is_meant and find_spec("triton") is not None


def run(device: torch.device, by_kernels: Callable[[], Result]) -> Result | None:
    """Return what the kernels make of it, or None where they do not run.

    A kernel that does not compile, or cannot be launched, is reported once; from then on that
    type of device uses torch.
    """
    if not run_on(device):
        return None
    try:
        return by_kernels()
    except torch.OutOfMemoryError:  # torch would run out of it too
        raise
    except Exception as error:  # compilers raise whatever they like
        _failed.add(device.type)
        _logger.warning(
            "Selection on %s runs without its Triton kernels, which is slower: %s: %s",
            device.type,
            type(error).__name__,
            error,
        )
        return None


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel, for those who count them."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


_recorders: list[list[Launch]] = []


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel; on tensors without data it is only recorded."""
    for recorder in _recorders:
        recorder.append(Launch(kernel, grid, arguments, constants))
    if not any(isinstance(value, Tensor) and value.is_meta for value in arguments):
        kernel[grid](*arguments, **constants)


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Collect the launches made inside the block."""
    launches: list[Launch] = []
    _recorders.append(launches)
    try:
        yield launches
    finally:
        _recorders.remove(launches)


def to_device(values: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return integers as an int64 tensor on a device, which does not make the host wait."""
    pinned = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


def readable(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return matrices whose rows kernels can read by address: one type, one stride, aligned.

    What has that form already, and so any state of an encoder, is not copied.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1 or not dtypes <= READ:
        tensors = [tensor.float() for tensor in tensors]
    first = tensors[0]
    fits = all(
        tensor.stride(-1) == 1
        and tensor.stride(-2) == first.stride(-2)
        and tensor.data_ptr() % 16 == 0
        for tensor in tensors
    )
    if fits:
        return list(tensors)
    return [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """`torch.stack`, without a copy where rows of one tensor lie equally far apart already."""
    first = rows[0]
    starts = [row.storage_offset() for row in rows]
    step = starts[1] - starts[0] if len(rows) > 1 else first.numel()
    owner = first.untyped_storage()._cdata
    fits = step > 0 and all(
        row.untyped_storage()._cdata == owner
        and row.stride() == first.stride()
        and start == starts[0] + number * step
        for number, (row, start) in enumerate(zip(rows, starts, strict=True))
    )
    if not fits:
        return torch.stack(list(rows))
    return first.as_strided((len(rows), *first.shape), (step, *first.stride()))

"""The greedy methods by kernels, in Triton's interpreter, beside the torch code."""

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import triton.runtime.interpreter as interpreter
from torch import Tensor

from msdg_vllm.core import kernels
from msdg_vllm.core.kernels import large_greedy
from msdg_vllm.methods import Encoder, Image, Signals, method_named
from tests.unit.core.cases import make_profile


def compare_rivals() -> dict[str, bool]:
    """Whether the greedy methods choose the same tokens by kernels and by torch."""
    facts = {}
    for name in ("divprune", "cdpruner", "cen_divprune", "cen_cdpruner"):
        for seed in range(12):
            image, budget = _rival_case(seed)
            kernels.DEVICES = set()
            expected = method_named(name).select(image, budget).indices
            kernels.DEVICES = {"cpu"}
            for way, most in (("by a matrix", 10**6), ("without", 0)):
                kernels.MAX_PAIRED_TOKENS = most
                with kernels.recorded_launches() as launches:
                    indices = method_named(name).select(image, budget).indices
                (launch,) = launches
                assert launch.kernel.fn.__name__.startswith("large") == (not most)
                facts[f"{name} of case {seed} {way}"] = torch.equal(indices, expected)
            if seed % 4 == 2:
                with programs_as_processes(3):
                    indices = method_named(name).select(image, budget).indices
                facts[f"{name} of case {seed} by programs that meet"] = torch.equal(
                    indices, expected
                )
    # Then torch would have taken over.
    facts["every kernel ran"] = not kernels._failed
    return facts


def _rival_case(seed: int) -> tuple[Image, int]:
    """An image for the greedy methods, and a budget."""
    generator = torch.Generator().manual_seed(seed)
    visual = torch.randn(10 + 5 * seed, 80, generator=generator)
    if seed % 3 == 1:  # copies
        visual[5:10] = visual[:5]
    if seed % 4 == 2:  # nothing, and what is not finite
        visual[2], visual[7, 3], visual[4, 1] = 0.0, torch.nan, torch.inf
    if seed % 4 == 3:  # in the span of a few
        visual = visual[:, :4] @ torch.randn(4, 80, generator=generator)
    query = torch.randn(3, 80, generator=generator) if seed % 2 else None
    return Image(Signals(), visual, Encoder(1, make_profile()), query=query), 1 + seed * 2


@contextmanager
def programs_as_processes(num_programs: int) -> Iterator[None]:
    """Let the programs of a cooperative launch run at once, on memory that they share."""

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        assert grid == (num_programs,)
        for argument in arguments:
            if isinstance(argument, Tensor):
                argument.share_memory_()
        children = [
            _forked(partial(_run_program, number, grid, kernel, arguments, constants))
            for number in range(num_programs)
        ]
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * num_programs

    with mock.patch.multiple(large_greedy, launch=launch, _num_programs=lambda _: num_programs):
        yield


def _run_program(
    number: int, grid: tuple[int, ...], kernel: Any, arguments: Any, constants: Any
) -> None:
    builder = interpreter.interpreter_builder
    builder.grid_dim, builder.grid_idx = (*grid, 1, 1), (number, 0, 0)
    with (
        mock.patch.multiple(builder, set_grid_dim=mock.DEFAULT, set_grid_idx=mock.DEFAULT),
        # It would copy what the others have not written yet.
        mock.patch.object(interpreter.GridExecutor, "_restore_args_dev"),
    ):
        kernel[(1,)](*arguments, **constants)


def _forked(work: Callable[[], None]) -> int:
    """Do some work in a child; return its process id."""
    child = os.fork()
    if child:
        return child
    signal.alarm(60)  # a meeting that somebody missed ends as a failure
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)

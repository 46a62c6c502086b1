"""Greedy choices without a matrix of cosines, one launch for all steps of an image.

A step compares all tokens with the one just taken, so the whole device works on it: each program
owns some tiles of tokens, and all of them meet after every step. They must run at once, which a
cooperative launch promises or refuses. Who owns a token changes no bit of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from msdg_vllm.core.kernels import launch
from msdg_vllm.core.kernels.grouping import SAME

_TILE, _EARLIER = 16, 64
# Of a row that is read at once: a program's part must leave room for a second one.
_DEPTH_BYTES = 1024
_PROGRAMS_PER_MULTIPROCESSOR = 2
# Those of an A100: what is counted without a device is counted for one.
_MULTIPROCESSORS_OF_NONE = 108


@triton.jit
def _meet(arrivals, number):
    """Wait until every program has come here `number` times, and see what all of them wrote."""
    tl.debug_barrier()
    tl.atomic_add(arrivals, 1, sem="release")
    while tl.atomic_add(arrivals, 0, sem="acquire") < number * tl.num_programs(0):
        pass
    tl.debug_barrier()


@triton.jit
def _cosines(units, tokens, index, width, TILE: tl.constexpr, DEPTH: tl.constexpr):
    """The cosines of a tile of tokens to the token `index`."""
    products = tl.zeros((TILE, DEPTH), units.dtype.element_ty)
    for start in range(0, width, DEPTH):
        columns = start + tl.arange(0, DEPTH)
        is_column = columns < width
        taken = tl.load(units + index.to(tl.int64) * width + columns, mask=is_column, other=0.0)
        rows = tokens.to(tl.int64)[:, None] * width + columns[None, :]
        products += tl.load(units + rows, mask=is_column[None, :], other=0.0) * taken[None, :]
    cosines = tl.sum(products, 1)
    return tl.where(cosines > SAME, 1.0, cosines)


@triton.jit(do_not_specialize=["num_tokens", "num_steps"])
def large_farthest_kernel(
    units, first, weight, nearest, lowest, places, arrivals, chosen,
    num_tokens, width, num_steps,
    TILE: tl.constexpr, DEPTH: tl.constexpr, PROGRAMS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Max-min diversity: each step takes the token farthest from the nearest one taken."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    slots = tl.arange(0, PROGRAMS)
    index = tl.full((), 0, tl.int32)
    for step in range(num_steps):
        least = tl.full((), float("inf"), units.dtype.element_ty)
        place = num_tokens
        for start in range(program * TILE, num_tokens, num_programs * TILE):
            tokens = start + tl.arange(0, TILE)
            is_token = tokens < num_tokens
            if step == 0:
                score = tl.load(first + tokens, mask=is_token, other=float("inf"))
            else:
                so_far = tl.load(nearest + tokens, mask=is_token, other=float("inf"))
                so_far = tl.maximum(so_far, _cosines(units, tokens, index, width, TILE, DEPTH))
                # What is taken or not finite is infinitely near.
                so_far = tl.where(tokens == index, float("inf"), so_far)
                tl.store(nearest + tokens, so_far, mask=is_token)
                score = so_far
                if WEIGHTED:
                    own = tl.load(weight + tokens, mask=is_token, other=1.0)
                    score = tl.where(so_far == float("inf"), so_far, own * (so_far - 1.0))
            value, at = tl.min(score, 0, return_indices=True, return_indices_tie_break_left=True)
            place = tl.where(value < least, start + at, place)
            least = tl.minimum(least, value)
        # In two places that take turns: some program may still read what the last step left.
        turn = step % 2 * PROGRAMS
        tl.store(lowest + turn + program, least)
        tl.store(places + turn + program, place)
        _meet(arrivals, step + 1)
        is_program = slots < num_programs
        values = tl.load(lowest + turn + slots, mask=is_program, other=float("inf"))
        found = tl.load(places + turn + slots, mask=is_program, other=num_tokens)
        index = tl.min(tl.where(values == tl.min(values, 0), found, num_tokens), 0)
        # With no token left the first is taken once more.
        index = tl.where(index < num_tokens, index, 0)
        if program == 0:
            tl.store(chosen + index, 1)


@triton.jit(do_not_specialize=["num_tokens", "num_steps"])
def large_determinant_kernel(
    units, weight, residual, rows, gains, lefts, places, arrivals, chosen,
    num_tokens, width, stride, num_steps, resolution, TILE: tl.constexpr,
    DEPTH: tl.constexpr, EARLIER: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Greedy MAP of a DPP: each step takes the token that adds most to the determinant.

    In float64, as `rows`, which hold a column of the Cholesky factor for each step. Of a token
    that was taken, or never may be, nothing is left.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    slots = tl.arange(0, PROGRAMS)
    index = tl.full((), 0, tl.int32)
    pivot = tl.full((), 1.0, tl.float64)
    step = tl.full((), 0, tl.int32)
    while step < num_steps:
        most = tl.full((), -1.0, tl.float64)
        most_left = tl.full((), 1.0, tl.float64)
        place = num_tokens
        for start in range(program * TILE, num_tokens, num_programs * TILE):
            tokens = start + tl.arange(0, TILE)
            is_token = tokens < num_tokens
            left = tl.load(residual + tokens, mask=is_token, other=0.0)
            if step > 0:
                explained = tl.zeros((TILE,), tl.float64)
                for early in range(0, step - 1, EARLIER):
                    earlier = early + tl.arange(0, EARLIER)
                    is_earlier = earlier < step - 1
                    own = tl.load(
                        rows + index.to(tl.int64) * stride + earlier, mask=is_earlier, other=0.0
                    )
                    every = tl.load(
                        rows + tokens.to(tl.int64)[:, None] * stride + earlier[None, :],
                        mask=is_token[:, None] & is_earlier[None, :],
                        other=0.0,
                    )
                    explained += tl.sum(every * own[None, :], 1)
                cosines = _cosines(units, tokens, index, width, TILE, DEPTH)
                row = (cosines - explained) / pivot
                tl.store(rows + tokens.to(tl.int64) * stride + step - 1, row, mask=is_token)
                left = tl.where(tokens == index, 0.0, left - row * row)
                tl.store(residual + tokens, left, mask=is_token)
            own_weight = tl.load(weight + tokens, mask=is_token, other=0.0)
            gain = tl.where(left > resolution, own_weight * own_weight * left, -1.0)
            value, at = tl.max(gain, 0, return_indices=True, return_indices_tie_break_left=True)
            left_there = tl.sum(tl.where(tokens == start + at, left, 0.0), 0)
            most_left = tl.where(value > most, left_there, most_left)
            place = tl.where(value > most, start + at, place)
            most = tl.maximum(most, value)
        # In two places that take turns: some program may still read what the last step left.
        turn = step % 2 * PROGRAMS
        tl.store(gains + turn + program, most)
        tl.store(lefts + turn + program, most_left)
        tl.store(places + turn + program, place)
        _meet(arrivals, step + 1)
        is_program = slots < num_programs
        values = tl.load(gains + turn + slots, mask=is_program, other=-1.0)
        found = tl.load(places + turn + slots, mask=is_program, other=num_tokens)
        index = tl.min(tl.where(values == tl.max(values, 0), found, num_tokens), 0)
        amounts = tl.load(lefts + turn + slots, mask=is_program, other=1.0)
        pivot = tl.sqrt(tl.max(tl.where(found == index, amounts, 0.0), 0))
        if (program == 0) & (index < num_tokens):
            tl.store(chosen + index, 1)
        # Without a token that adds something there is nothing left to do.
        step = tl.where(index < num_tokens, step + 1, num_steps)


def farthest_tokens(
    units: Tensor, first: Tensor, finite: Tensor, num_steps: int, weight: Tensor | None
) -> Tensor:
    """`greedy.farthest_tokens` of tokens at unit length, `(N', D')`."""
    num_tokens = len(finite)
    programs = _num_programs(units)
    chosen = torch.zeros_like(finite)
    nearest = torch.full_like(first, -torch.inf if weight is None else -1.0)
    launch(
        large_farthest_kernel, (programs,),
        units, first.contiguous(), first if weight is None else weight.contiguous(),
        nearest.masked_fill_(~finite, torch.inf), *_slots(units, programs, 1),
        chosen.view(torch.int8), num_tokens, units.stride(0), num_steps,
        WEIGHTED=weight is not None, **_sizes(units, programs),
    )  # fmt: skip
    return chosen


def spanning_tokens(
    units: Tensor, relevance: Tensor, finite: Tensor, num_steps: int, resolution: float
) -> Tensor:
    """`greedy.spanning_tokens` of tokens at unit length, `(N', D')` float64."""
    num_tokens = len(finite)
    programs = _num_programs(units)
    chosen = torch.zeros_like(finite)
    rows = units.new_empty(num_tokens, num_steps)
    launch(
        large_determinant_kernel, (programs,),
        units, relevance.contiguous(), finite.to(units.dtype), rows,
        *_slots(units, programs, 2), chosen.view(torch.int8),
        num_tokens, units.stride(0), num_steps, num_steps, resolution,
        EARLIER=_EARLIER, **_sizes(units, programs),
    )  # fmt: skip
    return chosen


def _num_programs(units: Tensor) -> int:
    """As many programs as run at once; in the interpreter one runs after the other."""
    device, num_tiles = units.device, -(-len(units) // _TILE)
    if device.type == "cpu":
        return 1
    num_multiprocessors = _MULTIPROCESSORS_OF_NONE
    if device.type == "cuda":
        num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return min(num_tiles, _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors)


def _slots(units: Tensor, programs: int, num_values: int) -> list[Tensor]:
    """Where programs tell each other what they found, and how many have arrived."""
    size = 2, triton.next_power_of_2(programs)
    return [
        *(units.new_empty(size) for _ in range(num_values)),
        units.new_empty(size, dtype=torch.int32),
        units.new_zeros(1, dtype=torch.int32),
    ]


def _sizes(units: Tensor, programs: int) -> dict[str, int]:
    return {
        "TILE": _TILE,
        "DEPTH": _DEPTH_BYTES // units.element_size(),
        "PROGRAMS": triton.next_power_of_2(programs),
        "num_warps": 8,
        "launch_cooperative_grid": True,
    }

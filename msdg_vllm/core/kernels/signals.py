"""Signals of tokens on a device (Alg. 1, lines 1-4): a few tokens per program, all images at once.

A token's values are reduced over its own patches alone, in an order that only the width decides. So
equal states give equal bits wherever and beside whatever they stand.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from msdg_vllm.core.kernels import READ, launch
from msdg_vllm.core.stream import TokenSignals

# Values of a state that one program reads at once; a row that is wider is read all the same.
_STATES_AT_ONCE = 2048
_LEAST_BLOCK = 64


def activation(state: Tensor, coordinate: int, patches: int, order: Tensor | None) -> Tensor:
    """Return the absolute value at the sink coordinate of each token, `(R, N)`.

    Args:
        state: The state that shows sinks, `(R, P, d)`.
        coordinate: Where it shows them.
        patches: How many patches merge into one token.
        order: Where each patch is, `(P,)`; None: in its place.
    """
    place = _Place.of(state, patches, order)
    found = torch.empty(place.shape, device=state.device)
    launch(
        activation_kernel, place.grid,
        *_located(state), place.order, found, place.num_tokens, place.width, coordinate,
        **place.constants,
    )  # fmt: skip
    return found


def saliency(
    before: Tensor, after: Tensor, scale: float, patches: int, order: Tensor | None
) -> Tensor:
    """Return how far the patches of each token moved, on average, times `scale`, `(R, N)`."""
    place = _Place.of(after, patches, order)
    found = torch.empty(place.shape, device=after.device)
    launch(
        saliency_kernel, place.grid,
        *_located(before), *_located(after), place.order, found,
        place.num_tokens, place.width, scale, **place.constants,
    )  # fmt: skip
    return found


def directions(
    ends: Sequence[Tensor],
    saliency: Tensor,
    activation: Tensor,
    patches: int,
    order: Tensor | None,
) -> TokenSignals:
    """Return the signals of tokens, given all but their directions; overwrites what is given.

    Args:
        ends: The states of the direction, `(R, P, d)`: early and late, or output features alone.
        saliency: `(R, N)`.
        activation: `(R, N)`.
        patches: How many patches merge into one token.
        order: Where each patch is, `(P,)`; None: in its place.
    """
    place = _Place.of(ends[-1], patches, order)
    device = saliency.device
    units = torch.empty(*place.shape, place.width, device=device)
    moved = torch.empty(place.shape, dtype=torch.bool, device=device)
    launch(
        direction_kernel, place.grid,
        *_located(ends[0]), *_located(ends[-1]), place.order,
        units, saliency, activation, moved.view(torch.int8), place.num_tokens, place.width,
        OUTPUT=len(ends) == 1, **place.constants,
    )  # fmt: skip
    return TokenSignals(saliency, activation, units, moved)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the kernels of token signals find patches, and how they share the work."""

    shape: tuple[int, int]  # (R, N)
    width: int
    order: Tensor
    constants: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        return self.shape[1]

    @property
    def grid(self) -> tuple[int, int]:
        return -(-self.num_tokens // self.constants["TOKENS"]), self.shape[0]

    @classmethod
    def of(cls, state: Tensor, patches: int, order: Tensor | None) -> "_Place":
        num_patches, width = state.shape[1] if order is None else len(order), state.shape[2]
        block = max(_LEAST_BLOCK, triton.next_power_of_2(width))
        constants = {
            "PATCHES": patches,
            "HAS_ORDER": order is not None,
            "TOKENS": max(1, _STATES_AT_ONCE // block),
            "BLOCK": block,
            "num_warps": 4 if block <= 2048 else 8,
        }
        # Not read without an order; a kernel wants some address all the same.
        some = torch.empty(0, dtype=torch.int64, device=state.device) if order is None else order
        return cls((state.shape[0], num_patches // patches), width, some, constants)


def _located(state: Tensor) -> tuple[Tensor, int, int]:
    """A state as kernels read it, `(R, P, d)`, and how far apart images and patches are."""
    if state.dtype not in READ:
        state = state.float()
    if state.stride(-1) != 1:
        state = state.contiguous()
    return state, state.stride(0), state.stride(1)


@triton.jit
def _norms(rows):
    return tl.sqrt(tl.sum(rows * rows, 1))


@triton.jit
def _units(rows, norms):
    return rows / tl.maximum(norms, 1e-12)[:, None]


@triton.jit
def _load_states(
    states, image, stride_image, stride, order, tokens, is_token, patch, width,
    PATCHES: tl.constexpr, HAS_ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The states of one patch of each of some tokens in float32."""
    patches = (tokens * PATCHES + patch).to(tl.int64)
    if HAS_ORDER:
        patches = tl.load(order + patches, mask=is_token, other=0)
    place = tl.arange(0, BLOCK)
    rows = states + image.to(tl.int64) * stride_image + patches[:, None] * stride + place[None, :]
    is_inside = is_token[:, None] & (place < width)[None, :]
    return tl.load(rows, mask=is_inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens", "coordinate"])
def activation_kernel(
    states, stride_image, stride, order, activation, num_tokens, width, coordinate,
    PATCHES: tl.constexpr, HAS_ORDER: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Line 1: the absolute value at the sink coordinate; infinite if the state is not finite."""
    block, image = tl.program_id(0), tl.program_id(1)
    tokens = block * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    place = tl.arange(0, BLOCK)
    highest = tl.zeros((TOKENS,), tl.float32)
    for patch in tl.static_range(PATCHES):
        state = _load_states(
            states, image, stride_image, stride, order, tokens, is_token, patch, width,
            PATCHES, HAS_ORDER, BLOCK,
        )  # fmt: skip
        value = tl.sum(tl.where(place[None, :] == coordinate, tl.abs(state), 0.0), 1)
        value = tl.where(_norms(state) < float("inf"), value, float("inf"))
        highest = tl.maximum(highest, value)
    tl.store(activation + image * num_tokens + tokens, highest, mask=is_token)


@triton.jit(do_not_specialize=["num_tokens"])
def saliency_kernel(
    start, start_image, start_stride, end, end_image, end_stride, order, saliency,
    num_tokens, width, scale,
    PATCHES: tl.constexpr, HAS_ORDER: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Line 4: how far the patches of a token moved over the window, on average."""
    block, image = tl.program_id(0), tl.program_id(1)
    tokens = block * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    total = tl.zeros((TOKENS,), tl.float32)
    for patch in tl.static_range(PATCHES):
        before = _load_states(
            start, image, start_image, start_stride, order, tokens, is_token, patch, width,
            PATCHES, HAS_ORDER, BLOCK,
        )  # fmt: skip
        after = _load_states(
            end, image, end_image, end_stride, order, tokens, is_token, patch, width,
            PATCHES, HAS_ORDER, BLOCK,
        )  # fmt: skip
        total += _norms(after - before) * scale
    tl.store(saliency + image * num_tokens + tokens, total / PATCHES, mask=is_token)


@triton.jit(do_not_specialize=["num_tokens"])
def direction_kernel(
    early, early_image, early_stride, late, late_image, late_stride, order,
    directions, saliency, activation, moved, num_tokens, width,
    PATCHES: tl.constexpr, OUTPUT: tl.constexpr, HAS_ORDER: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Line 3: unit directions, and which tokens turn at all.

    Reads and corrects saliency and activation: one value that is not finite decides for all.
    """
    block, image = tl.program_id(0), tl.program_id(1)
    tokens = block * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    here = image * num_tokens + tokens
    u = tl.load(saliency + here, mask=is_token, other=0.0)
    value = tl.load(activation + here, mask=is_token, other=0.0)
    is_finite = (u < float("inf")) & (value < float("inf"))
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for patch in tl.static_range(PATCHES):
        last = _load_states(
            late, image, late_image, late_stride, order, tokens, is_token, patch, width,
            PATCHES, HAS_ORDER, BLOCK,
        )  # fmt: skip
        last_norms = _norms(last)
        is_finite = is_finite & (last_norms < float("inf"))
        direction = _units(last, last_norms)
        if not OUTPUT:
            first = _load_states(
                early, image, early_image, early_stride, order, tokens, is_token, patch, width,
                PATCHES, HAS_ORDER, BLOCK,
            )  # fmt: skip
            first_norms = _norms(first)
            is_finite = is_finite & (first_norms < float("inf"))
            direction -= _units(first, first_norms)
        if PATCHES > 1:
            direction = _units(direction, _norms(direction))
        total += direction
    total = total / PATCHES
    norms = _norms(total)
    units = tl.where(is_finite[:, None], _units(total, norms), 0.0)
    place = tl.arange(0, BLOCK)
    is_inside = is_token[:, None] & (place < width)[None, :]
    rows = directions + here.to(tl.int64)[:, None] * width + place[None, :]
    tl.store(rows, units, mask=is_inside)
    tl.store(saliency + here, tl.where(is_finite, u, 0.0), mask=is_token)
    tl.store(activation + here, tl.where(is_finite, value, float("inf")), mask=is_token)
    tl.store(moved + here, (is_finite & (norms > 0.0)).to(tl.int8), mask=is_token)


@triton.jit(do_not_specialize=["num_tokens", "padded_tokens"])
def candidate_kernel(
    activation, activation_image, moved, moved_image, valid, sink_mask, candidates, turning,
    num_tokens, padded_tokens, threshold, HAS_VALID: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Line 1: which tokens are sinks, which are candidates, and which of those turn.

    Places beyond the last token are no candidates.
    """
    block, image = tl.program_id(0), tl.program_id(1)
    tokens = block * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    value = tl.load(activation + image * activation_image + tokens, mask=is_token, other=0.0)
    is_sink = value > threshold
    is_valid = is_token
    here = image * num_tokens + tokens
    if HAS_VALID:
        is_valid = tl.load(valid + here, mask=is_token, other=0) != 0
    is_candidate = is_valid & ~is_sink
    turns = tl.load(moved + image * moved_image + tokens, mask=is_token, other=0) != 0
    tl.store(sink_mask + here, (is_valid & is_sink).to(tl.int8), mask=is_token)
    padded = image * padded_tokens + tokens
    is_place = tokens < padded_tokens
    tl.store(candidates + padded, is_candidate.to(tl.int8), mask=is_place)
    tl.store(turning + padded, (is_candidate & turns).to(tl.int8), mask=is_place)

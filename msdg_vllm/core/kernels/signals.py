"""Signals of tokens on a device (Alg. 1, lines 1-4): a few tokens per program, all images at once.

A token's values are reduced over its own patches alone, in an order that only the width decides. So
equal states give equal bits wherever and beside whatever they stand. States are not stacked: a
table holds the address of each.
"""

import triton
import triton.language as tl

# The columns of a table of addresses.
EARLY = tl.constexpr(0)
LATE = tl.constexpr(1)
START = tl.constexpr(2)
END = tl.constexpr(3)
SINK = tl.constexpr(4)
COLUMNS = tl.constexpr(5)


@triton.jit
def _norms(rows):
    return tl.sqrt(tl.sum(rows * rows, 1))


@triton.jit
def _units(rows, norms):
    return rows / tl.maximum(norms, 1e-12)[:, None]


@triton.jit
def _load_states(
    table, column, patches, is_patch, width, stride, TYPE: tl.constexpr, BLOCK: tl.constexpr
):
    """The states of some patches in float32; their address is in a column of the image's table."""
    start = tl.multiple_of(tl.load(table + column).to(tl.pointer_type(TYPE)), 16)
    place = tl.arange(0, BLOCK)
    rows = start + patches.to(tl.int64)[:, None] * stride + place[None, :]
    is_inside = is_patch[:, None] & (place < width)[None, :]
    return tl.load(rows, mask=is_inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens", "coordinate"])
def activation_kernel(
    table, activation, num_tokens, width, stride, coordinate,
    TYPE: tl.constexpr, PATCHES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Line 1: the absolute value at the sink coordinate; infinite if the state is not finite."""
    block, image = tl.program_id(0), tl.program_id(1)
    table += image * COLUMNS
    tokens = block * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    place = tl.arange(0, BLOCK)
    highest = tl.zeros((TOKENS,), tl.float32)
    for patch in tl.static_range(PATCHES):
        patches = tokens * PATCHES + patch
        state = _load_states(table, SINK, patches, is_token, width, stride, TYPE, BLOCK)
        value = tl.sum(tl.where(place[None, :] == coordinate, tl.abs(state), 0.0), 1)
        value = tl.where(_norms(state) < float("inf"), value, float("inf"))
        highest = tl.maximum(highest, value)
    tl.store(activation + image * num_tokens + tokens, highest, mask=is_token)


@triton.jit(do_not_specialize=["num_tokens"])
def saliency_kernel(
    table, saliency, num_tokens, width, stride, scale,
    TYPE: tl.constexpr, PATCHES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Line 4: how far the patches of a token moved over the window, on average."""
    block, image = tl.program_id(0), tl.program_id(1)
    table += image * COLUMNS
    tokens = block * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    total = tl.zeros((TOKENS,), tl.float32)
    for patch in tl.static_range(PATCHES):
        patches = tokens * PATCHES + patch
        before = _load_states(table, START, patches, is_token, width, stride, TYPE, BLOCK)
        after = _load_states(table, END, patches, is_token, width, stride, TYPE, BLOCK)
        total += _norms(after - before) * scale
    tl.store(saliency + image * num_tokens + tokens, total / PATCHES, mask=is_token)


@triton.jit(do_not_specialize=["num_tokens"])
def direction_kernel(
    table, directions, saliency, activation, valid, sink_mask, candidates, moved,
    num_tokens, padded_tokens, width, padded_width, stride, threshold,
    TYPE: tl.constexpr, PATCHES: tl.constexpr, OUTPUT: tl.constexpr, HAS_VALID: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lines 1 and 3: unit directions, and which tokens are sinks, candidates, and turn at all.

    Reads and corrects saliency and activation: one value that is not finite decides for all.
    Places beyond the last token become zero directions and no candidates.
    """
    block, image = tl.program_id(0), tl.program_id(1)
    table += image * COLUMNS
    tokens = block * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    here = image * num_tokens + tokens
    u = tl.load(saliency + here, mask=is_token, other=0.0)
    value = tl.load(activation + here, mask=is_token, other=0.0)
    is_finite = (u < float("inf")) & (value < float("inf"))
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for patch in tl.static_range(PATCHES):
        patches = tokens * PATCHES + patch
        late = _load_states(table, LATE, patches, is_token, width, stride, TYPE, BLOCK)
        late_norms = _norms(late)
        is_finite = is_finite & (late_norms < float("inf"))
        direction = _units(late, late_norms)
        if not OUTPUT:
            early = _load_states(table, EARLY, patches, is_token, width, stride, TYPE, BLOCK)
            early_norms = _norms(early)
            is_finite = is_finite & (early_norms < float("inf"))
            direction -= _units(early, early_norms)
        if PATCHES > 1:
            direction = _units(direction, _norms(direction))
        total += direction
    total = total / PATCHES
    norms = _norms(total)
    units = tl.where(is_finite[:, None], _units(total, norms), 0.0)
    place = tl.arange(0, BLOCK)
    padded = image.to(tl.int64) * padded_tokens + tokens
    is_place = tokens < padded_tokens
    is_inside = is_place[:, None] & (place < padded_width)[None, :]
    tl.store(directions + padded[:, None] * padded_width + place[None, :], units, mask=is_inside)

    value = tl.where(is_finite, value, float("inf"))
    is_sink = value > threshold
    is_valid = is_token
    if HAS_VALID:
        is_valid = tl.load(valid + here, mask=is_token, other=0) != 0
    is_candidate = is_valid & ~is_sink
    tl.store(saliency + here, tl.where(is_finite, u, 0.0), mask=is_token)
    tl.store(activation + here, value, mask=is_token)
    tl.store(sink_mask + here, (is_valid & is_sink).to(tl.int8), mask=is_token)
    tl.store(candidates + padded, is_candidate.to(tl.int8), mask=is_place)
    turns = is_candidate & is_finite & (norms > 0.0)
    tl.store(moved + padded, turns.to(tl.int8), mask=is_place)

"""Groups on a device (Alg. 1, lines 7-13) beyond 1,024 tokens: nothing is as large as N by N.

A seed takes one launch, an iteration two: tokens are assigned block by block, then groups are added
up by blocks of columns. A row of an image that has converged is left alone.
"""

import triton
import triton.language as tl

from msdg_vllm.core.kernels.grouping import SAME, centroid_norms, is_settled, nth_of


@triton.jit(do_not_specialize=["max_groups", "seed"])
def start_kernel(
    candidates, moved, num_groups, num_candidates, smallest, places, losses, converged, squares,
    padded_tokens, max_groups, seed, SPAN: tl.constexpr, GROUPS: tl.constexpr,
    TOKEN_BLOCKS: tl.constexpr, WIDTH_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Line 7: K of an image, and its first seed, the candidate number `seed mod M`."""
    image = tl.program_id(0)
    candidates += image * padded_tokens
    moved += image * padded_tokens
    count = 0
    any_moved = 0
    for start in range(0, padded_tokens, SPAN):
        tokens = start + tl.arange(0, SPAN)
        is_inside = tokens < padded_tokens
        count += tl.sum(tl.load(candidates + tokens, mask=is_inside, other=0).to(tl.int32), 0)
        turns = tl.load(moved + tokens, mask=is_inside, other=0)
        any_moved = tl.maximum(any_moved, tl.max(turns.to(tl.int32), 0))
    tl.store(
        num_groups + image, tl.minimum(tl.where(any_moved > 0, max_groups, 1), count).to(tl.int64)
    )
    tl.store(num_candidates + image, count)

    first = nth_of(seed, count)
    index = padded_tokens - 1
    before = 0
    for start in range(0, padded_tokens, SPAN):
        tokens = start + tl.arange(0, SPAN)
        is_candidate = tl.load(candidates + tokens, mask=tokens < padded_tokens, other=0).to(
            tl.int32
        )
        ordinal = before + tl.cumsum(is_candidate, 0)
        is_first = (is_candidate != 0) & (ordinal == first)
        index = tl.minimum(index, tl.min(tl.where(is_first, tokens, padded_tokens - 1), 0))
        before += tl.sum(is_candidate, 0)
    # As if a round of comparisons had found it.
    blocks = tl.arange(0, TOKEN_BLOCKS)
    tl.store(smallest + image * TOKEN_BLOCKS + blocks, tl.where(blocks == 0, 0.0, float("inf")))
    tl.store(places + image * TOKEN_BLOCKS + blocks, tl.zeros((TOKEN_BLOCKS,), tl.int32) + index)
    tl.store(losses + image, float("inf"))
    tl.store(converged + image, 0)
    # A seed is a unit vector, or zero: the norm of its sum counts as 1.
    parts = tl.arange(0, GROUPS * WIDTH_BLOCKS)
    one = tl.where(parts % WIDTH_BLOCKS == 0, 1.0, 0.0)
    tl.store(squares + image * GROUPS * WIDTH_BLOCKS + parts, one)


@triton.jit(do_not_specialize=["group"])
def farthest_kernel(
    directions, candidates, num_groups, centroids, nearest,
    smallest, places, new_smallest, new_places,
    padded_tokens, padded_width, group, GROUPS: tl.constexpr,
    TOKEN_BLOCKS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Line 7, Eq. 5: one more seed, the token that is farthest from all before it."""
    block, image = tl.program_id(0), tl.program_id(1)
    blocks = tl.arange(0, TOKEN_BLOCKS)
    if group >= tl.load(num_groups + image):
        return
    is_block = blocks * TILE < padded_tokens
    least = tl.load(smallest + image * TOKEN_BLOCKS + blocks, mask=is_block, other=float("inf"))
    found = tl.argmin(least, 0)
    index = tl.load(places + image * TOKEN_BLOCKS + found)
    directions += image.to(tl.int64) * padded_tokens * padded_width
    candidates += image * padded_tokens
    nearest += image * padded_tokens
    centroids += (image * GROUPS + group).to(tl.int64) * padded_width
    tokens = block * TILE + tl.arange(0, TILE)
    depth = tl.arange(0, DEPTH)
    products = tl.zeros((TILE,), tl.float32)
    for start in range(0, padded_width, DEPTH):
        chosen = tl.load(directions + index.to(tl.int64) * padded_width + start + depth)
        rows = tokens.to(tl.int64)[:, None] * padded_width + (start + depth)[None, :]
        products += tl.sum(tl.load(directions + rows) * chosen[None, :], 1)
        if block == 0:
            tl.store(centroids + start + depth, chosen)
    is_candidate = tl.load(candidates + tokens) != 0
    unseen = tl.where(is_candidate, -float("inf"), float("inf"))
    so_far = tl.where(group > 0, tl.load(nearest + tokens), unseen)
    so_far = tl.maximum(so_far, tl.minimum(products, SAME))
    so_far = tl.where(tokens == index, float("inf"), so_far)
    tl.store(nearest + tokens, so_far)
    least, place = tl.min(so_far, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(new_smallest + image * TOKEN_BLOCKS + block, least)
    tl.store(new_places + image * TOKEN_BLOCKS + block, block * TILE + place)


@triton.jit(do_not_specialize=["is_first"])
def assign_kernel(
    directions, candidates, num_groups, centroids, squares, labels, nearest, distances, changes,
    converged, padded_tokens, padded_width, is_first, GROUPS: tl.constexpr,
    TOKEN_BLOCKS: tl.constexpr, WIDTH_BLOCKS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Line 9: the nearest centroid of a block of tokens, and the block's part of the loss."""
    block, image = tl.program_id(0), tl.program_id(1)
    if tl.load(converged + image) != 0:
        return
    directions += image.to(tl.int64) * padded_tokens * padded_width
    centroids += image.to(tl.int64) * GROUPS * padded_width
    tokens = block * TILE + tl.arange(0, TILE)
    groups, depth = tl.arange(0, GROUPS), tl.arange(0, DEPTH)
    is_active = groups < tl.load(num_groups + image)
    products = tl.zeros((GROUPS, TILE), tl.float32)
    for start in range(0, padded_width, DEPTH):
        left = tl.load(
            centroids + groups[:, None] * padded_width + (start + depth)[None, :],
            mask=is_active[:, None],
            other=0.0,
        )
        rows = tokens.to(tl.int64)[None, :] * padded_width + (start + depth)[:, None]
        products += tl.dot(left, tl.load(directions + rows), input_precision="ieee")
    norms = centroid_norms(squares + image * GROUPS * WIDTH_BLOCKS, GROUPS, WIDTH_BLOCKS)
    cosines = tl.minimum(products / norms[:, None], SAME)
    cosines = tl.where(is_active[:, None], cosines, -float("inf"))
    cosine, label = tl.max(cosines, 0, return_indices=True, return_indices_tie_break_left=True)
    here = image * padded_tokens + tokens
    is_candidate = tl.load(candidates + here) != 0
    label = tl.where(is_candidate, label, -1).to(tl.int64)
    cosine = tl.where(is_candidate, cosine, float("inf"))
    before = tl.where(is_first != 0, -2, tl.load(labels + here))
    distance = tl.where(is_candidate, tl.maximum(1.0 - cosine, 0.0), 0.0)
    tl.store(labels + here, label)
    tl.store(nearest + here, cosine)
    tl.store(distances + image * TOKEN_BLOCKS + block, tl.sum(distance, 0))
    tl.store(changes + image * TOKEN_BLOCKS + block, tl.sum((label != before).to(tl.int32), 0))


@triton.jit
def _next_loneliest(nearest, padded_tokens, cosine, token, SPAN: tl.constexpr):
    """The token whose cosine to its centroid is next to the given one's, ties by order."""
    best = float("inf")
    place = padded_tokens
    for start in range(0, padded_tokens, SPAN):
        tokens = start + tl.arange(0, SPAN)
        values = tl.load(nearest + tokens, mask=tokens < padded_tokens, other=float("inf"))
        is_after = (values > cosine) | ((values == cosine) & (tokens > token))
        values = tl.where(is_after, values, float("inf"))
        least, first = tl.min(values, 0, return_indices=True, return_indices_tie_break_left=True)
        place = tl.where(least < best, start + first, place)
        best = tl.minimum(best, least)
    return best, place


@triton.jit
def update_kernel(
    directions, num_groups, num_candidates, centroids, squares, labels, nearest, distances, changes,
    losses, new_losses, converged, padded_tokens, padded_width, num_token_blocks,
    GROUPS: tl.constexpr, TOKEN_BLOCKS: tl.constexpr, WIDTH_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Lines 10-12: check for convergence, then add up some columns of all groups."""
    block, image = tl.program_id(0), tl.program_id(1)
    # Set by an earlier launch, or just now by another program that will come to the same end.
    if tl.load(converged + image) != 0:
        return
    blocks = tl.arange(0, TOKEN_BLOCKS)
    is_block = blocks < num_token_blocks
    here = image * TOKEN_BLOCKS + blocks
    distance = tl.sum(tl.load(distances + here, mask=is_block, other=0.0), 0)
    num_changed = tl.sum(tl.load(changes + here, mask=is_block, other=0), 0)
    loss = distance / tl.maximum(tl.load(num_candidates + image), 1)
    tl.store(new_losses + image, loss)
    if is_settled(loss, tl.load(losses + image), num_changed):
        tl.store(converged + image, 1)
        return
    directions += image.to(tl.int64) * padded_tokens * padded_width
    centroids += image.to(tl.int64) * GROUPS * padded_width
    labels += image * padded_tokens
    nearest += image * padded_tokens
    K = tl.load(num_groups + image).to(tl.int32)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    groups = tl.arange(0, GROUPS)
    totals = tl.zeros((GROUPS, COLUMNS), tl.float32)
    sizes = tl.zeros((GROUPS,), tl.int32)
    for start in range(0, padded_tokens, ROWS):
        tokens = start + tl.arange(0, ROWS)
        members = groups[:, None] == tl.load(labels + tokens).to(tl.int32)[None, :]
        sizes += tl.sum(members.to(tl.int32), 1)
        rows = tl.load(directions + tokens.to(tl.int64)[:, None] * padded_width + columns[None, :])
        totals += tl.dot(members.to(tl.float32), rows, input_precision="ieee")
    square = tl.sum(totals * totals, 1)
    is_empty = (sizes == 0) & (groups < K)
    if tl.sum(is_empty.to(tl.int32), 0) > 0:
        cosine = -float("inf")
        token = -1
        for group in range(K):
            if tl.sum((is_empty & (groups == group)).to(tl.int32), 0) > 0:
                cosine, token = _next_loneliest(nearest, padded_tokens, cosine, token, SPAN)
                row = tl.load(directions + token.to(tl.int64) * padded_width + columns)
                totals = tl.where(groups[:, None] == group, row[None, :], totals)
                square = tl.where(groups == group, tl.where(block == 0, 1.0, 0.0), square)
    tl.store(centroids + groups[:, None] * padded_width + columns[None, :], totals)
    tl.store(squares + image * GROUPS * WIDTH_BLOCKS + groups * WIDTH_BLOCKS + block, square)

"""Groups on a device (Alg. 1, lines 7-13) for up to 1,024 tokens, on a matrix of all cosines.

The product of a token with the sum of a group is the sum of its products with the members. So one
matrix per image serves seeding and all iterations, and an iteration needs one launch: each program
assigns all tokens for itself, which is little work, and adds up what its own columns need.
"""

import triton
import triton.language as tl

from msdg_vllm.core.grouping import SAME_DIRECTION

SAME = tl.constexpr(SAME_DIRECTION)


@triton.jit
def gram_kernel(
    directions, gram, padded_tokens, padded_width, TILE: tl.constexpr, DEPTH: tl.constexpr
):
    """The cosines of a tile of pairs, and of the mirrored tile with the same bits."""
    column, row, image = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if column > row:
        return
    directions += image.to(tl.int64) * padded_tokens * padded_width
    gram += image.to(tl.int64) * padded_tokens * padded_tokens
    rows = row * TILE + tl.arange(0, TILE)
    columns = column * TILE + tl.arange(0, TILE)
    depth = tl.arange(0, DEPTH)
    products = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, padded_width, DEPTH):
        left = tl.load(directions + rows[:, None] * padded_width + (start + depth)[None, :])
        right = tl.load(directions + columns[None, :] * padded_width + (start + depth)[:, None])
        products += tl.dot(left, right, input_precision="ieee")
    tl.store(gram + rows[:, None] * padded_tokens + columns[None, :], products)
    if column < row:
        mirrored = columns[:, None] * padded_tokens + rows[None, :]
        tl.store(gram + mirrored, tl.trans(products))


@triton.jit
def nth_of(seed, count):
    """`seed mod count`, counted from 1; a negative remainder is brought back into range."""
    modulus = tl.maximum(count, 1)
    remainder = seed % modulus
    return tl.where(remainder < 0, remainder + modulus, remainder) + 1


@triton.jit(do_not_specialize=["max_groups", "seed"])
def seed_kernel(
    gram, candidates, moved, num_groups, sums, squares, new_squares, labels, losses, converged,
    padded_tokens, max_groups, seed,
    TOKENS: tl.constexpr, GROUPS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Line 7, Eq. 5: farthest-point seeding; one program per image.

    Leaves the cosines to the seeds as the sums of groups with one member each.
    """
    image = tl.program_id(0)
    gram += image.to(tl.int64) * padded_tokens * padded_tokens
    sums += image * GROUPS * padded_tokens
    squares += image * GROUPS * BLOCKS
    tokens = tl.arange(0, TOKENS)
    is_inside = tokens < padded_tokens
    here = image * padded_tokens + tokens
    is_candidate = tl.load(candidates + here, mask=is_inside, other=0) != 0
    count = tl.sum(is_candidate.to(tl.int32), 0)
    any_moved = tl.max(tl.load(moved + here, mask=is_inside, other=0).to(tl.int32), 0)
    K = tl.minimum(tl.where(any_moved > 0, max_groups, 1), count)
    tl.store(num_groups + image, K.to(tl.int64))

    ordinal = tl.cumsum(is_candidate.to(tl.int32), 0)
    first = nth_of(seed, count)
    index = tl.min(tl.where(is_candidate & (ordinal == first), tokens, padded_tokens - 1), 0)
    # Infinite, so never the smallest, for tokens that are chosen or no candidates.
    nearest = tl.where(is_candidate, -float("inf"), float("inf"))
    for group in range(K):
        row = tl.load(gram + index * padded_tokens + tokens, mask=is_inside, other=0.0)
        tl.store(sums + group * padded_tokens + tokens, row, mask=is_inside)
        nearest = tl.maximum(nearest, tl.minimum(row, SAME))
        nearest = tl.where(tokens == index, float("inf"), nearest)
        index = tl.argmin(nearest, 0).to(tl.int32)
    # A seed is a unit vector, or zero: the norm of its sum counts as 1.
    parts = tl.arange(0, GROUPS * BLOCKS)
    tl.store(squares + parts, tl.where(parts % BLOCKS == 0, 1.0, 0.0))
    tl.store(
        new_squares + image * GROUPS * BLOCKS + parts, tl.zeros((GROUPS * BLOCKS,), tl.float32)
    )
    # No assignment yet: what comes first is neither unchanged nor of a similar loss.
    tl.store(labels + here, tl.full((TOKENS,), -2, tl.int32), mask=is_inside)
    tl.store(losses + image, float("inf"))
    tl.store(converged + image, 0)


@triton.jit
def _assign(
    sums, norms, candidates, tokens, num_groups, padded_tokens,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Line 9: the nearest centroid of some tokens (ties: lower group), the cosine to it."""
    groups = tl.arange(0, GROUPS)
    products = tl.load(sums + groups[:, None] * padded_tokens + tokens[None, :])
    cosines = tl.minimum(products / norms[:, None], SAME)
    cosines = tl.where(groups[:, None] < num_groups, cosines, -float("inf"))
    nearest, label = tl.max(cosines, 0, return_indices=True, return_indices_tie_break_left=True)
    is_candidate = tl.load(candidates + tokens) != 0
    label = tl.where(is_candidate, label, -1).to(tl.int32)
    return label, tl.where(is_candidate, nearest, float("inf"))


@triton.jit
def centroid_norms(squares, GROUPS: tl.constexpr, BLOCKS: tl.constexpr):
    """The norms of the sums of groups, from the parts of their squares."""
    groups, blocks = tl.arange(0, GROUPS), tl.arange(0, BLOCKS)
    square = tl.sum(tl.load(squares + groups[:, None] * BLOCKS + blocks[None, :]), 1)
    return tl.maximum(tl.sqrt(tl.maximum(square, 0.0)), 1e-12)


@triton.jit
def is_settled(loss, previous_loss, num_changed):
    """Line 10: the two stopping rules; the first loss has none before it, which is infinite."""
    had_loss = previous_loss < float("inf")
    change = tl.abs(tl.where(had_loss, previous_loss, 0.0) - loss)
    is_small = had_loss & (change / tl.maximum(previous_loss, 1e-12) < 1e-5)
    return is_small | (num_changed == 0)


@triton.jit
def iterate_kernel(
    gram, candidates, num_groups, nearest,
    sums, squares, labels, losses, converged,
    new_sums, new_squares, new_labels, new_losses, new_converged,
    padded_tokens, TOKENS: tl.constexpr, GROUPS: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Lines 9-12: assign all tokens, check for convergence, add up the groups for some columns.

    The programs of an image come to the same labels and store the same bits in the same places.
    What is read was stored by an earlier launch, but for `nearest`.
    """
    block, image = tl.program_id(0), tl.program_id(1)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    labels += image * padded_tokens
    new_labels += image * padded_tokens
    if tl.load(converged + image) != 0:
        tl.store(new_labels + columns, tl.load(labels + columns))
        tl.store(new_converged + image, 1)
        return
    gram += image.to(tl.int64) * padded_tokens * padded_tokens
    candidates += image * padded_tokens
    nearest += image * padded_tokens
    sums += image * GROUPS * padded_tokens
    new_sums += image * GROUPS * padded_tokens
    squares += image * GROUPS * BLOCKS
    new_squares += image * GROUPS * BLOCKS
    K = tl.load(num_groups + image).to(tl.int32)
    groups = tl.arange(0, GROUPS)
    norms = centroid_norms(squares, GROUPS, BLOCKS)

    totals = tl.zeros((GROUPS, COLUMNS), tl.float32)
    sizes = tl.zeros((GROUPS,), tl.int32)
    distance = 0.0
    num_changed = 0
    num_candidates = 0
    for start in range(0, padded_tokens, ROWS):
        tokens = start + tl.arange(0, ROWS)
        label, cosine = _assign(sums, norms, candidates, tokens, K, padded_tokens, GROUPS)
        is_candidate = label >= 0
        distance += tl.sum(tl.where(is_candidate, tl.maximum(1.0 - cosine, 0.0), 0.0), 0)
        num_changed += tl.sum((label != tl.load(labels + tokens)).to(tl.int32), 0)
        num_candidates += tl.sum(is_candidate.to(tl.int32), 0)
        members = groups[:, None] == label[None, :]
        sizes += tl.sum(members.to(tl.int32), 1)
        products = tl.load(gram + tokens[:, None] * padded_tokens + columns[None, :])
        totals += tl.dot(members.to(tl.float32), products, input_precision="ieee")
        tl.store(new_labels + tokens, label)
        tl.store(nearest + tokens, cosine)
    loss = distance / tl.maximum(num_candidates, 1)
    settled = is_settled(loss, tl.load(losses + image), num_changed)
    tl.store(new_losses + image, loss)
    tl.store(new_converged + image, settled.to(tl.int32))

    own, _ = _assign(sums, norms, candidates, columns, K, padded_tokens, GROUPS)
    square = tl.sum(tl.where(groups[:, None] == own[None, :], totals, 0.0), 1)
    is_empty = (sizes == 0) & (groups < K)
    if tl.sum(is_empty.to(tl.int32), 0) > 0:
        # Line 12: in the place of an empty group the token that is least like its centroid.
        tl.debug_barrier()
        everyone = tl.arange(0, TOKENS)
        lonely = tl.load(nearest + everyone, mask=everyone < padded_tokens, other=float("inf"))
        for group in range(K):
            if tl.sum((is_empty & (groups == group)).to(tl.int32), 0) > 0:
                token = tl.argmin(lonely, 0).to(tl.int32)
                lonely = tl.where(everyone == token, float("inf"), lonely)
                row = tl.load(gram + token * padded_tokens + columns)
                totals = tl.where(groups[:, None] == group, row[None, :], totals)
                square = tl.where(groups == group, tl.where(block == 0, 1.0, 0.0), square)
    tl.store(new_sums + groups[:, None] * padded_tokens + columns[None, :], totals)
    tl.store(new_squares + groups * BLOCKS + block, square)


@triton.jit(do_not_specialize=["num_tokens"])
def finish_kernel(
    candidates, num_groups, sums, squares, labels, converged, groups,
    num_tokens, padded_tokens, GROUPS: tl.constexpr, BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Line 13: the last assignment; an image that has converged keeps its labels."""
    block, image = tl.program_id(0), tl.program_id(1)
    tokens = block * COLUMNS + tl.arange(0, COLUMNS)
    K = tl.load(num_groups + image).to(tl.int32)
    norms = centroid_norms(squares + image * GROUPS * BLOCKS, GROUPS, BLOCKS)
    sums += image * GROUPS * padded_tokens
    candidates += image * padded_tokens
    label, _ = _assign(sums, norms, candidates, tokens, K, padded_tokens, GROUPS)
    before = tl.load(labels + image * padded_tokens + tokens)
    label = tl.where(tl.load(converged + image) != 0, before, label)
    tl.store(groups + image * num_tokens + tokens, label.to(tl.int64), mask=tokens < num_tokens)

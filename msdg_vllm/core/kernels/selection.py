"""Selection on a device (Alg. 1, lines 4, 6 and 14-21) for images with their own questions.

A plan holds one row per image: the addresses of its tokens, query and signals, its sizes and its
budget. So images of any size, with any question and budget, share four launches and one copy.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from msdg_vllm.core.analysis import ImageSignals
from msdg_vllm.core.kernels import launch, readable, to_device
from msdg_vllm.core.kernels.analysis import TYPES

# The columns of a plan: addresses, sizes, and where an image's part of an output starts.
VISUAL = tl.constexpr(0)
QUERY = tl.constexpr(1)
SALIENCY = tl.constexpr(2)
LABELS = tl.constexpr(3)
NUM_GROUPS = tl.constexpr(4)
SINKS = tl.constexpr(5)
ACTIVATION = tl.constexpr(6)
NUM_TOKENS = tl.constexpr(7)
NUM_QUERY = tl.constexpr(8)
BUDGET = tl.constexpr(9)
OFFSET = tl.constexpr(10)
KEPT = tl.constexpr(11)
ENTRIES = tl.constexpr(12)


@triton.jit
def relevance_kernel(
    plan, relevance, score, width, stride, TYPE: tl.constexpr, QUERY_TYPE: tl.constexpr,
    TOKENS: tl.constexpr, QUERIES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Lines 4 and 6, Eq. 2: the highest cosine of each token to a query token; times saliency."""
    block, image = tl.program_id(0), tl.program_id(1)
    plan += image * ENTRIES
    num_tokens = tl.load(plan + NUM_TOKENS)
    if block * TOKENS >= num_tokens:
        return
    num_query = tl.load(plan + NUM_QUERY)
    visual = tl.multiple_of(tl.load(plan + VISUAL).to(tl.pointer_type(TYPE)), 16)
    query = tl.multiple_of(tl.load(plan + QUERY).to(tl.pointer_type(QUERY_TYPE)), 16)
    tokens = block * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    depth = tl.arange(0, DEPTH)
    best = tl.full((TOKENS,), -float("inf"), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    num_usable = 0
    for first in range(0, num_query.to(tl.int32), QUERIES):
        asked = first + tl.arange(0, QUERIES)
        products = tl.zeros((TOKENS, QUERIES), tl.float32)
        query_squares = tl.zeros((QUERIES,), tl.float32)
        squares = tl.zeros((TOKENS,), tl.float32)
        for start in range(0, width, DEPTH):
            is_inside = start + depth < width
            x = tl.load(
                visual + tokens.to(tl.int64)[:, None] * stride + (start + depth)[None, :],
                mask=is_token[:, None] & is_inside[None, :],
                other=0.0,
            ).to(tl.float32)
            t = tl.load(
                query + asked.to(tl.int64)[:, None] * width + (start + depth)[None, :],
                mask=(asked < num_query)[:, None] & is_inside[None, :],
                other=0.0,
            ).to(tl.float32)
            products += tl.dot(x, tl.trans(t), input_precision="ieee")
            squares += tl.sum(x * x, 1)
            query_squares += tl.sum(t * t, 1)
        # A query token that is not finite is passed over.
        is_usable = (query_squares < float("inf")) & (asked < num_query)
        cosines = products / tl.maximum(tl.sqrt(query_squares), 1e-12)[None, :]
        best = tl.maximum(best, tl.max(tl.where(is_usable[None, :], cosines, -float("inf")), 1))
        num_usable += tl.sum(is_usable.to(tl.int32), 0)
    norms = tl.sqrt(squares)
    alpha = tl.where(norms < float("inf"), best / tl.maximum(norms, 1e-12), -1.0)
    alpha = tl.where(num_usable > 0, alpha, 1.0)
    u = tl.load(tl.load(plan + SALIENCY).to(tl.pointer_type(tl.float32)) + tokens, mask=is_token)
    here = tl.load(plan + OFFSET) + tokens
    tl.store(relevance + here, alpha, mask=is_token)
    tl.store(score + here, alpha * u, mask=is_token)


@triton.jit
def _precedes(values):
    """Whether value j goes before value i in descending order, ties by index: `[i, j]`."""
    index = tl.arange(0, values.shape[0])
    higher = values[None, :] > values[:, None]
    return higher | ((values[None, :] == values[:, None]) & (index[None, :] < index[:, None]))


@triton.jit
def budget_kernel(
    plan, score, quotas,
    GROUPS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Lines 14-19, Eq. 4: how many tokens of each group to keep; one program per image.

    Before the quotas of the groups stands that of the tokens that are no candidates.
    """
    image = tl.program_id(0)
    plan += image * ENTRIES
    labels = tl.load(plan + LABELS).to(tl.pointer_type(tl.int64))
    num_tokens = tl.load(plan + NUM_TOKENS).to(tl.int32)
    K = tl.load(tl.load(plan + NUM_GROUPS).to(tl.pointer_type(tl.int64)))
    score += tl.load(plan + OFFSET)
    groups = tl.arange(0, GROUPS)
    sizes = tl.zeros((GROUPS,), tl.int32)
    sums = tl.zeros((GROUPS,), tl.float32)
    for start in range(0, num_tokens, SPAN):
        tokens = start + tl.arange(0, SPAN)
        is_token = tokens < num_tokens
        label = tl.load(labels + tokens, mask=is_token, other=-1).to(tl.int32)
        value = tl.load(score + tokens, mask=is_token, other=0.0)
        members = groups[:, None] == label[None, :]
        sizes += tl.sum(members.to(tl.int32), 1)
        sums += tl.sum(tl.where(members, value[None, :], 0.0), 1)
    # A mean that overflowed must not turn the shares into NaN.
    means = sums / tl.maximum(sizes, 1)
    means = tl.where(means == means, means, 0.0)
    means = tl.minimum(tl.maximum(means, -3.4028234663852886e38), 3.4028234663852886e38)

    # In float64: in float32 all shares below 1e-45 would be equal.
    is_active = groups < K
    exponents = tl.where(is_active, means.to(tl.float64), -float("inf"))
    top = tl.max(exponents, 0)
    weights = tl.where(is_active, tl.exp(tl.where(is_active, exponents - top, 0.0)), 0.0)
    shares = weights / tl.maximum(tl.sum(weights, 0), 1e-300)
    budget = tl.load(plan + BUDGET).to(tl.int32)
    spent = tl.minimum(budget, tl.sum(sizes, 0))
    quota = spent.to(tl.float64) * shares
    whole = tl.floor(quota)
    given = tl.minimum(sizes, whole.to(tl.int32))
    left = spent - tl.sum(given, 0)

    is_open = given < sizes
    remainder = tl.where(is_open, quota - whole, -1.0)
    given += (is_open & (tl.sum(_precedes(remainder).to(tl.int32), 1) < left)).to(tl.int32)
    left = spent - tl.sum(given, 0)

    room = sizes - given
    room_before = tl.sum(tl.where(_precedes(shares), room[None, :], 0), 1)
    given += tl.minimum(tl.maximum(left - room_before, 0), room)
    quotas += image * (GROUPS + 1)
    tl.store(quotas, budget - spent)
    tl.store(quotas + 1 + groups, given)


@triton.jit
def _load_ranking(score, labels, activation, sinks, tokens, num_tokens):
    """The group and the worth of some tokens; those that are no candidates are a group as well.

    In that group stand sinks by ascending activation, then what is not finite, then padding.
    """
    is_token = tokens < num_tokens
    label = tl.load(labels + tokens, mask=is_token, other=-2).to(tl.int32)
    key = tl.minimum(tl.load(activation + tokens, mask=is_token, other=0.0), 3.4028234663852886e38)
    key = tl.where(tl.load(sinks + tokens, mask=is_token, other=0) != 0, key, float("inf"))
    value = tl.load(score + tokens, mask=is_token, other=0.0)
    return label, tl.where(label >= 0, value, -key)


@triton.jit(do_not_specialize=["num_blocks"])
def rank_kernel(
    plan, score, quotas, kept, num_kept, num_blocks,
    GROUPS: tl.constexpr,
    OWN: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Line 20: whether each token is among the best of its group, by counting those before it."""
    block, image = tl.program_id(0), tl.program_id(1)
    plan += image * ENTRIES
    num_kept += image * num_blocks
    num_tokens = tl.load(plan + NUM_TOKENS).to(tl.int32)
    if block * OWN >= num_tokens:
        tl.store(num_kept + block, 0)
        return
    labels = tl.load(plan + LABELS).to(tl.pointer_type(tl.int64))
    activation = tl.load(plan + ACTIVATION).to(tl.pointer_type(tl.float32))
    sinks = tl.load(plan + SINKS).to(tl.pointer_type(tl.int8))
    offset = tl.load(plan + OFFSET)
    score += offset
    tokens = block * OWN + tl.arange(0, OWN)
    label, value = _load_ranking(score, labels, activation, sinks, tokens, num_tokens)
    rank = tl.zeros((OWN,), tl.int32)
    for start in range(0, num_tokens, OTHERS):
        others = start + tl.arange(0, OTHERS)
        group, worth = _load_ranking(score, labels, activation, sinks, others, num_tokens)
        is_before = (worth[:, None] > value[None, :]) | (
            (worth[:, None] == value[None, :]) & (others[:, None] < tokens[None, :])
        )
        is_before = is_before & (group[:, None] == label[None, :])
        rank += tl.sum(is_before.to(tl.int32), 0)
    is_token = tokens < num_tokens
    quota = tl.load(quotas + image * (GROUPS + 1) + 1 + label, mask=is_token, other=0)
    is_kept = is_token & (rank < quota)
    tl.store(kept + offset + tokens, is_kept.to(tl.int8), mask=is_token)
    tl.store(num_kept + block, tl.sum(is_kept.to(tl.int32), 0))


@triton.jit(do_not_specialize=["num_blocks"])
def keep_kernel(
    plan, kept, num_kept, indices, num_blocks,
    BLOCKS: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Line 21: the kept tokens of all images, each image's in original order."""
    block, image = tl.program_id(0), tl.program_id(1)
    plan += image * ENTRIES
    num_tokens = tl.load(plan + NUM_TOKENS).to(tl.int32)
    if block * OWN >= num_tokens:
        return
    blocks = tl.arange(0, BLOCKS)
    counts = tl.load(num_kept + image * num_blocks + blocks, mask=blocks < block, other=0)
    tokens = block * OWN + tl.arange(0, OWN)
    is_kept = tl.load(kept + tl.load(plan + OFFSET) + tokens, mask=tokens < num_tokens, other=0)
    place = tl.sum(counts, 0) + tl.cumsum(is_kept.to(tl.int32), 0) - 1
    here = tl.load(plan + KEPT) + place
    tl.store(indices + here, tokens.to(tl.int64), mask=is_kept != 0)


_TOKENS, _QUERIES, _DEPTH, _OWN, _OTHERS, _SPAN = 32, 16, 64, 64, 16, 256


def select_rows(
    signals: Sequence[ImageSignals],
    visual: Sequence[Tensor],
    queries: Sequence[Tensor | None],
    budgets: Sequence[int],
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return for each image the tokens to keep, and the relevance and the score of all.

    Images may differ in size, question and budget; each has its own result, bit for bit,
    whatever it travels with.

    Args:
        signals: Of one image each: `(N,)` tensors.
        visual: `(N, D)` of each image.
        queries: `(Q, D)` of each image; None or Q = 0 sets its relevance to 1.
        budgets: B of each image, from 1 to its N.
    """
    tokens = readable(visual)
    width, device = tokens[0].shape[1], tokens[0].device
    # A query goes with several images when it asks about tiles.
    asked = {id(query): query for query in queries if query is not None and len(query)}
    asked = dict(zip(asked, _contiguous(list(asked.values())), strict=True))
    sizes = [row.num_tokens for row in signals]
    plan, num_tokens, num_kept = [], 0, 0
    for row, x, query, budget, size in zip(signals, tokens, queries, budgets, sizes, strict=True):
        question = asked.get(id(query))
        plan.append(
            [
                x.data_ptr(),
                0 if question is None else question.data_ptr(),
                row.saliency.data_ptr(),
                row.groups.data_ptr(),
                row.num_groups.data_ptr(),
                row.sink_mask.data_ptr(),
                row.sink_activation.data_ptr(),
                size,
                0 if question is None else len(question),
                budget,
                num_tokens,
                num_kept,
            ]
        )
        num_tokens, num_kept = num_tokens + size, num_kept + budget
    on_device = to_device(plan, device)

    groups = max(16, triton.next_power_of_2(max(row.max_groups for row in signals)))
    num_rows, num_blocks = len(plan), -(-max(sizes) // _OWN)
    relevance, score = torch.empty(2, num_tokens, device=device)
    quotas = torch.empty(num_rows, groups + 1, dtype=torch.int32, device=device)
    kept = torch.empty(num_tokens, dtype=torch.int8, device=device)
    counts = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=device)
    indices = torch.empty(num_kept, dtype=torch.int64, device=device)
    query_type = next((TYPES[query.dtype] for query in asked.values()), tl.float32)
    launch(
        relevance_kernel, (-(-max(sizes) // _TOKENS), num_rows),
        on_device, relevance, score, width, tokens[0].stride(0),
        TYPE=TYPES[tokens[0].dtype], QUERY_TYPE=query_type,
        TOKENS=_TOKENS, QUERIES=_QUERIES, DEPTH=_DEPTH, num_warps=4,
    )  # fmt: skip
    launch(
        budget_kernel, (num_rows,),
        on_device, score, quotas, GROUPS=groups, SPAN=_SPAN, num_warps=4,
    )  # fmt: skip
    launch(
        rank_kernel, (num_blocks, num_rows),
        on_device, score, quotas, kept, counts, num_blocks,
        GROUPS=groups, OWN=_OWN, OTHERS=_OTHERS, num_warps=4,
    )  # fmt: skip
    launch(
        keep_kernel, (num_blocks, num_rows),
        on_device, kept, counts, indices, num_blocks,
        BLOCKS=triton.next_power_of_2(num_blocks), OWN=_OWN, num_warps=4,
    )  # fmt: skip
    return list(
        zip(indices.split(list(budgets)), relevance.split(sizes), score.split(sizes), strict=True)
    )


def _contiguous(queries: list[Tensor]) -> list[Tensor]:
    """The queries in one type, row after row."""
    if not queries:
        return []
    return [
        query
        if query.stride(0) == query.shape[1]
        else query.clone(memory_format=torch.contiguous_format)
        for query in readable(queries)
    ]

"""Greedy choices, one launch for all steps of an image.

Up to 1,024 tokens one program works on a matrix of all cosines. `large_greedy` has no such matrix.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from msdg_vllm.core.kernels import large_greedy, launch

# Values of earlier steps that a program holds at once.
_EARLIER_AT_ONCE = 4096


@triton.jit(do_not_specialize=["num_tokens", "num_steps"])
def farthest_kernel(
    cosines, first, finite, weight, chosen, num_tokens, stride, num_steps,
    TOKENS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Max-min diversity: each step takes the token farthest from the nearest one taken."""
    tokens = tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    is_finite = tl.load(finite + tokens, mask=is_token, other=0) != 0
    nearest = tl.full((TOKENS,), -1.0 if WEIGHTED else -float("inf"), cosines.dtype.element_ty)
    own = tl.load(weight + tokens, mask=is_token, other=1.0)
    is_chosen = tokens < 0
    # argmin returns the first of equal values.
    start = tl.load(first + tokens, mask=is_token, other=float("inf"))
    index = tl.argmin(start, 0).to(tl.int32)
    for _ in range(num_steps):
        is_chosen = is_chosen | (tokens == index)
        row = tl.load(cosines + index * stride + tokens, mask=is_token, other=float("inf"))
        nearest = tl.maximum(nearest, row)
        score = own * (nearest - 1.0) if WEIGHTED else nearest
        # What is taken or not finite is infinitely near.
        score = tl.where(is_finite & ~is_chosen, score, float("inf"))
        index = tl.argmin(score, 0).to(tl.int32)
    tl.store(chosen + tokens, is_chosen.to(tl.int8), mask=is_token)


@triton.jit(do_not_specialize=["num_tokens", "num_steps"])
def determinant_kernel(
    cosines, relevance, finite, rows, chosen, num_tokens, stride, num_steps, resolution,
    TOKENS: tl.constexpr, EARLIER: tl.constexpr,
):  # fmt: skip
    """Greedy MAP of a DPP: each step takes the token that adds most to the determinant.

    In float64, as `rows`, which hold a row of the Cholesky factor for each step.
    """
    tokens = tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    is_finite = tl.load(finite + tokens, mask=is_token, other=0) != 0
    weight = tl.load(relevance + tokens, mask=is_token, other=0.0)
    weight = weight * weight
    residual = tl.full((TOKENS,), 1.0, tl.float64)
    is_chosen = tokens < 0
    for step in range(num_steps):
        is_open = is_finite & ~is_chosen & (residual > resolution)
        index = tl.argmax(tl.where(is_open, weight * residual, -1.0), 0).to(tl.int32)
        # Without an open token the largest is any token: nothing may change then.
        adds = tl.sum((is_open & (tokens == index)).to(tl.int32), 0) > 0
        explained = tl.zeros((TOKENS,), tl.float64)
        for start in range(0, step, EARLIER):
            earlier = start + tl.arange(0, EARLIER)
            is_earlier = earlier < step
            own = tl.load(rows + earlier * stride + index, mask=is_earlier, other=0.0)
            every = tl.load(
                rows + earlier[:, None] * stride + tokens[None, :],
                mask=is_earlier[:, None] & is_token[None, :],
                other=0.0,
            )
            explained += tl.sum(every * own[:, None], 0)
        left = tl.sum(tl.where(tokens == index, residual, 0.0), 0)
        pivot = tl.sqrt(tl.maximum(left, resolution))
        row = tl.load(cosines + index * stride + tokens, mask=is_token, other=0.0)
        row = tl.where(adds, (row - explained) / pivot, 0.0)
        tl.store(rows + step * stride + tokens, row, mask=is_token)
        tl.debug_barrier()
        residual -= row * row
        is_chosen = is_chosen | (adds & (tokens == index))
    tl.store(chosen + tokens, is_chosen.to(tl.int8), mask=is_token)


def farthest_tokens(
    units: Tensor,
    pairs: Tensor | None,
    first: Tensor,
    finite: Tensor,
    num_steps: int,
    weight: Tensor | None = None,
) -> Tensor:
    """Return `num_steps` tokens that lie far apart, as a mask `(N,)`.

    Args:
        units: The tokens at unit length, `(N', D')` with N' >= N.
        pairs: Their cosines, `(N', N')`; None if there are too many.
        first: `(N,)`, of which the lowest is the first to be taken.
        finite: `(N,)`, False for tokens that go last.
        num_steps: At most N.
        weight: `(N,)`, by which a distance counts; None if all count alike.
    """
    if pairs is None:
        return large_greedy.farthest_tokens(units, first, finite, num_steps, weight)
    chosen = torch.empty_like(finite)
    launch(
        farthest_kernel, (1,),
        pairs, first.contiguous(), finite.contiguous().view(torch.int8),
        first if weight is None else weight.contiguous(), chosen.view(torch.int8),
        len(finite), pairs.stride(0), num_steps,
        WEIGHTED=weight is not None, **_sizes(len(finite)),
    )  # fmt: skip
    return chosen


def spanning_tokens(
    units: Tensor,
    pairs: Tensor | None,
    relevance: Tensor,
    finite: Tensor,
    num_steps: int,
    resolution: float,
) -> Tensor:
    """Return at most `num_steps` tokens of a large determinant, as a mask `(N,)`.

    Args:
        units: The tokens at unit length, `(N', D')` float64 with N' >= N.
        pairs: Their cosines, `(N', N')`; None if there are too many.
        relevance: `(N,)` float64, by which the rows and columns of the determinant are scaled.
        finite: `(N,)`, False for tokens that are never taken.
        num_steps: At most N.
        resolution: A token of which less is left than this adds nothing.
    """
    if pairs is None:
        return large_greedy.spanning_tokens(units, relevance, finite, num_steps, resolution)
    chosen = torch.empty_like(finite)
    sizes = _sizes(len(finite))
    launch(
        determinant_kernel, (1,),
        pairs, relevance.contiguous(), finite.contiguous().view(torch.int8),
        pairs.new_empty(num_steps, pairs.stride(0)), chosen.view(torch.int8),
        len(finite), pairs.stride(0), num_steps, resolution,
        EARLIER=max(1, _EARLIER_AT_ONCE // sizes["TOKENS"]), **sizes,
    )  # fmt: skip
    return chosen


def _sizes(num_tokens: int) -> dict[str, int]:
    """A block for all tokens, and as many warps as hold it in registers."""
    block = max(16, triton.next_power_of_2(num_tokens))
    return {"TOKENS": block, "num_warps": min(16, max(4, block // 256))}

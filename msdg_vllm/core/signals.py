"""Relevance of the tokens of one image (Alg. 1, line 6; Eq. 2), and the norms all signals rest on.

Functions take one image, never a batch: a floating-point reduction launched on the same shape
gives the same bits whatever else travels in the batch.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from msdg_vllm.core.tiles import NARROW_TILE, TILE, fill_up, round_up, token_blocks

# Algorithm 1: unit(z) = z / max(|z|, 1e-12).
_UNIT_EPSILON = 1e-12


def query_relevance(visual: Tensor, query: Tensor) -> Tensor:
    """Return alpha of Eq. 2: each token's highest cosine similarity to a query token.

    Finite whatever comes in: a projected token that is not finite gets the lowest cosine, -1; a
    query token that is not finite is passed over; a query with none left counts as empty.

    Args:
        visual: Projected tokens, `(N, D)`.
        query: Query embeddings, `(Q, D)`.

    Returns:
        `(N,)` float32, all ones when the query is empty.
    """
    num_tokens, num_query = visual.shape[0], query.shape[0]
    if num_query == 0:
        return visual.new_ones(num_tokens, dtype=torch.float32)
    query = fill_up(query.float(), round_up(num_query, NARROW_TILE))
    query_norms = row_norms(query)
    usable = query_norms.isfinite() & (torch.arange(len(query), device=query.device) < num_query)
    units = unit(query, query_norms).masked_fill_(~usable.unsqueeze(-1), 0.0)
    highest = []
    for block in token_blocks(num_tokens):
        x = visual[block]
        x = fill_up(x.float(), max(len(x), TILE))
        products = (x @ units.T).masked_fill_(~usable, -torch.inf)  # (n, Q)
        # Dividing by |x| after the maximum saves a pass over (n, D).
        norms = row_norms(x)
        cosines = products.amax(dim=-1) / norms.clamp_min(_UNIT_EPSILON)
        highest.append(torch.where(norms.isfinite(), cosines, -1.0))
    relevance = torch.cat(highest)[:num_tokens]
    return torch.where(usable.any(), relevance, 1.0)


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Compute in float32 and nothing less: neither autocast nor TF32 holds inside.

    A graph that is compiled cannot say the latter; its caller must.
    """
    autocast: AbstractContextManager[object] = nullcontext()
    if torch.amp.is_autocast_available(device.type):
        autocast = torch.autocast(device.type, enabled=False)
    return autocast if torch.compiler.is_compiling() else _without_tf32(autocast)


@contextmanager
def _without_tf32(autocast: AbstractContextManager[object]) -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with autocast:
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def row_norms(vectors: Tensor) -> Tensor:
    """Return the Euclidean norm of each row: `(N, d)` -> `(N,)`."""
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return norms


def unit(vectors: Tensor, norms: Tensor) -> Tensor:
    """Return unit(z) = z / max(|z|, 1e-12) for each row z of `(N, d)`, given the norms."""
    return vectors / divisors(norms)


def unit_(vectors: Tensor, norms: Tensor) -> Tensor:
    """`unit` in place: a second `(N, d)` buffer would cost more than the division."""
    return vectors.div_(divisors(norms))


def divisors(norms: Tensor) -> Tensor:
    """The divisors of `unit`, `(N, 1)`."""
    return norms.clamp_min(_UNIT_EPSILON).unsqueeze(-1)

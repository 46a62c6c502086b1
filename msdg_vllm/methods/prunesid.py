"""PruneSID (Fang et al., 2025): groups by principal components, suppression inside each group.

The original's principal components are randomised, so that equal calls keep other tokens. Here
they are exact, in float64. The group of a token does not depend on signs, nor on the basis of an
eigenspace: components with equal eigenvalues count as one.

It waits for the device: for the eigenvectors, then for the counts on which suppression and quotas
rest. So no kernel could save it its launches, and it has none. Its cost grows with the cube of
min(N, d).
"""

import math
from fractions import Fraction
from itertools import accumulate

import torch
from torch import Tensor

from msdg_vllm.methods.image import Image, Selection, top_tokens
from msdg_vllm.methods.method import Method
from msdg_vllm.methods.needs import Encoder, Needs
from msdg_vllm.methods.similarity import UnitTokens, snap

# Relative to the largest eigenvalue: below it is zero, and closer together are equal.
_EIGENVALUE_RESOLUTION = 1e-10
# Loadings are compared in steps of this size, so that equal tokens tie.
_LOADING_RESOLUTION = 2.0**-30


class PruneSID(Method):
    """The best tokens of each group of related ones.

    A group holds the tokens that load most on the same principal component. Inside it the best
    token suppresses those too similar to it, and so on; the budget is shared by what survives.

    With a class token its attention ranks the tokens. Without one, as in the original's form for
    Qwen, the loading does, on projected tokens and with another threshold.
    """

    # Cosines of all pairs of a group, which may be all tokens, take 64 MiB then.
    max_tokens = 4096

    def needs(self, encoder: Encoder) -> Needs:
        if encoder.has_class_token:
            return Needs(class_attention=(encoder.last_layer,), features=True)
        return Needs(visual=True)

    def select(self, image: Image, budget: int) -> Selection:
        attention = None
        features = image.visual
        if image.encoder.has_class_token:
            assert image.signals.features is not None
            features = image.per_token(image.signals.features)
            attention = image.per_token(image.signals.class_attention[image.encoder.last_layer])
        tokens = UnitTokens.of(features)
        finite = tokens.finite if attention is None else tokens.finite & attention.isfinite()
        members = finite.nonzero().squeeze(-1)
        scores = torch.where(finite, 0.0, torch.nan)
        if len(members) <= budget:
            return Selection(top_tokens(scores, budget))

        num_components = max(4 if attention is None else 1, budget // 4)
        loadings = _loadings(features.index_select(0, members), num_components)  # (M, q)
        strength, group = loadings.max(dim=-1)
        score = strength if attention is None else attention.index_select(0, members)
        units = tokens.units.index_select(0, members)
        threshold = _threshold(units, budget, by_attention=attention is not None)
        kept = _best_of_groups(units, group, score, threshold, budget)
        first = torch.zeros_like(finite)
        first[members[kept]] = True
        groups = torch.full_like(finite, -1, dtype=torch.int64).scatter(0, members, group)
        return Selection(top_tokens(scores, budget, first=first), scores=attention, groups=groups)


def _best_of_groups(
    units: Tensor, group: Tensor, score: Tensor, threshold: float, budget: int
) -> list[int]:
    """The places of the tokens to keep, `budget` in all."""
    labels = group.tolist()
    groups: dict[int, list[int]] = {label: [] for label in sorted(set(labels))}
    for token in score.argsort(descending=True, stable=True).tolist():
        groups[labels[token]].append(token)
    split = [_suppress(units, tokens, threshold) for tokens in groups.values()]
    sizes = [len(tokens) for tokens in groups.values()]
    quotas = _quotas(sizes, [len(survivors) for survivors, _ in split], budget)
    return [
        token
        for (survivors, others), quota in zip(split, quotas, strict=True)
        for token in (survivors + others)[:quota]
    ]


def _loadings(features: Tensor, num_components: int) -> Tensor:
    """How much of each token lies along each principal component, in steps, `(M, q')` float64.

    Tokens are the variables and features the samples. Components of equal eigenvalue are one
    column: the length of the projection on their common space.
    """
    samples = features.double().sigmoid().T  # (d, M)
    samples = samples - samples.mean(dim=0)
    num_samples, num_tokens = samples.shape
    # Both products have the same eigenvalues; the smaller one is cheaper by far.
    if num_tokens <= num_samples:
        values, vectors = torch.linalg.eigh(samples.T @ samples)
    else:
        values, left = torch.linalg.eigh(samples @ samples.T)
        vectors = samples.T @ left / values.clamp_min(torch.finfo(values.dtype).tiny).sqrt()
    values, squares = values.flip(0), vectors.flip(1).square()
    resolution = _EIGENVALUE_RESOLUTION * values[0]
    rank = int((values > resolution).sum())
    if not rank:  # no token varies
        return torch.zeros_like(squares[:, :1])
    is_new = torch.cat([values.new_ones(1), (values[:-1] - values[1:] > resolution).double()])
    column = is_new[:rank].cumsum(0).long() - 1
    num_columns = int(column[min(num_components, rank) - 1]) + 1
    same = column.unsqueeze(-1) == torch.arange(num_columns, device=column.device)
    projections: Tensor = squares[:, :rank] @ same.double()  # a sum over equal eigenvalues
    return (projections.sqrt() / _LOADING_RESOLUTION).round()


def _threshold(units: Tensor, budget: int, *, by_attention: bool) -> float:
    """Above which cosine a token is suppressed: a multiple of the mean over all pairs."""
    num_tokens = len(units)
    total = units.double().sum(dim=0).square().sum()  # of cosines, each pair twice
    own = units.double().square().sum()
    if by_attention:
        mean = (total - own) / (num_tokens * (num_tokens - 1))
        return float(mean) * budget / 32
    half = (total + own) / 2 / num_tokens**2
    return float(half) * max(18 * budget / num_tokens, 1.0)


def _suppress(units: Tensor, tokens: list[int], threshold: float) -> tuple[list[int], list[int]]:
    """Survivors and suppressed tokens of a group given by descending score, both in that order."""
    if threshold >= 1:
        return tokens, []
    own = units[tokens]
    too_close = (snap(own @ own.T) > threshold).cpu()
    survives = torch.ones(len(tokens), dtype=torch.bool)
    for place in range(len(tokens)):
        if survives[place]:
            survives[place + 1 :] &= ~too_close[place, place + 1 :]
    kept = survives.tolist()
    return (
        [token for token, survivor in zip(tokens, kept, strict=True) if survivor],
        [token for token, survivor in zip(tokens, kept, strict=True) if not survivor],
    )


def _quotas(sizes: list[int], survivors: list[int], budget: int) -> list[int]:
    """How many tokens of each group to keep: at most its size, `budget` in all."""
    by_survivors = sorted(range(len(sizes)), key=lambda g: (-survivors[g], g))
    if len(sizes) > budget:
        chosen = set(by_survivors[:budget])
        return [int(g in chosen) for g in range(len(sizes))]
    bound = 5 * math.ceil(budget / 64)
    bounds = [min(bound, s, n) for s, n in zip(sizes, survivors, strict=True)]
    while sum(bounds) < budget:
        bounds = [min(b + 1, size) for b, size in zip(bounds, sizes, strict=True)]
    rest, total = budget - len(sizes), sum(survivors)
    # Rounding the running sum makes the shares add up; ties to even, as torch rounds.
    running = [round(Fraction(rest * count, total)) for count in accumulate(survivors)]
    quotas = [
        min(1 + now - before, b)
        for now, before, b in zip(running, [0, *running], bounds, strict=False)
    ]
    for g in by_survivors:
        quotas[g] += min(bounds[g] - quotas[g], budget - sum(quotas))
    return quotas

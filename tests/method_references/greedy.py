"""Methods that choose token after token on the projected tokens: DivPrune, CDPruner, both
after centring, and dart0."""

import math
from itertools import pairwise

import numpy as np

from tests.method_references.choice import NOISE, Array, Choice, cosine, fill, ranked


def _usable(x: Array) -> list[int]:
    return [i for i in range(len(x)) if np.isfinite(x[i]).all()]


def divprune_reference(x: Array, budget: int) -> Choice:
    """D_ij = 1 - cos; argmax_i min_{j != i} D_ij, then argmax_i min_{j in S} D_ij, no repeats."""
    out = Choice()
    tokens = _usable(x)
    distance = {(i, j): 1.0 - cosine(x[i], x[j]) for i in tokens for j in tokens}
    chosen: list[int] = []
    while len(chosen) < min(budget, len(tokens)):
        left = [i for i in tokens if i not in chosen]
        value = {
            i: min((distance[i, j] for j in chosen or tokens if j != i), default=math.inf)
            for i in left
        }
        best = left[0]
        for i in left:
            if value[i] > value[best]:
                best = i
        for i in left:
            out.observe(value[best] - value[i], 2 * NOISE)
        chosen.append(best)
    out.keep = fill(chosen, budget, len(x))
    return out


def cdpruner_reference(x: Array, t: Array, budget: int) -> Choice:
    """r from the mean cosine to the query, L = diag(r) S diag(r), greedy MAP; then by r."""
    out = Choice()
    tokens = _usable(x)
    r, r_noise = _relevance(out, x, t, tokens)
    return _determinant(out, x, tokens, r, dict.fromkeys(tokens, r_noise), budget)


def cen_divprune_reference(x: Array, budget: int) -> Choice:
    """D_ij = 1 - cos of x - mean; argmax_i g_i min_{j != i} D_ij, then g_i min_{j in S} D_ij."""
    out = Choice()
    tokens = _usable(x)
    y = _centred(out, x, tokens)
    g, g_noise = _distinctiveness(out, x, tokens)
    distance = {(i, j): 1.0 - cosine(y[i], y[j]) for i in tokens for j in tokens}
    chosen: list[int] = []
    while len(chosen) < min(budget, len(tokens)):
        left = [i for i in tokens if i not in chosen]
        far = {
            i: min((distance[i, j] for j in chosen or tokens if j != i), default=2.0) for i in left
        }
        best = left[0]
        for i in left:
            if g[i] * far[i] > g[best] * far[best]:
                best = i
        for i in left:
            noise = 2 * NOISE * (g[best] + g[i]) + g_noise * (far[best] + far[i])
            out.observe(g[best] * far[best] - g[i] * far[i], noise)
        chosen.append(best)
    out.keep = fill(chosen, budget, len(x))
    return out


def cen_cdpruner_reference(x: Array, t: Array, budget: int) -> Choice:
    """CDPruner on x - mean, with the product of relevance and distinctiveness for relevance."""
    out = Choice()
    tokens = _usable(x)
    r, r_noise = _relevance(out, x, t, tokens)
    g, g_noise = _distinctiveness(out, x, tokens)
    weight = {i: r[i] * g[i] for i in tokens}
    y = _centred(out, x, tokens)
    # Centring and the cosines behind it are in float64.
    noise = {i: r[i] * g_noise + g[i] * r_noise for i in tokens}
    return _determinant(out, y, tokens, weight, noise, budget, 1e-12)


def _centred(out: Choice, x: Array, tokens: list[int]) -> Array:
    """x less the mean of the usable tokens; zero where that leaves next to nothing."""
    y = x.copy()
    if not tokens:
        return y
    mean = sum((x[i] for i in tokens), np.zeros(x.shape[1])) / len(tokens)
    longest = max(math.sqrt(float((x[i] * x[i]).sum())) for i in tokens)
    for i in tokens:
        y[i] = x[i] - mean
        length = math.sqrt(float((y[i] * y[i]).sum()))
        out.observe(length - 2**-20 * longest, 2**-40 * longest)
        if length <= 2**-20 * longest:
            y[i] = 0.0
    return y


def _distinctiveness(out: Choice, x: Array, tokens: list[int]) -> tuple[dict[int, float], float]:
    """g_i = -mean_j cos(x_i, x_j), scaled as relevance is; and its noise."""
    count = max(len(tokens), 1)
    g = {i: -sum(cosine(x[i], x[j]) for j in tokens) / count for i in tokens}
    return _scaled(out, g)


def _determinant(
    out: Choice,
    x: Array,
    tokens: list[int],
    r: dict[int, float],
    r_noise: dict[int, float],
    budget: int,
    cosine_noise: float = NOISE,
) -> Choice:
    """Greedy MAP of L = diag(r) S diag(r); then by r."""
    kernel = {(i, j): r[i] * cosine(x[i], x[j]) * r[j] for i in tokens for j in tokens}
    d2 = {i: kernel[i, i] for i in tokens}
    d2 = (
        {i: r[i] * r[i] for i in tokens} if tokens else d2
    )  # a zero token has the cosine 1 to itself
    rows: list[dict[int, float]] = []
    chosen: list[int] = []
    amplification = 1.0
    while len(chosen) < min(budget, len(tokens)):
        # What is left of a token, without its relevance, must be more than float32 resolves.
        left = [i for i in tokens if i not in chosen]
        for i in left:
            out.observe(d2[i] / r[i] ** 2 - 2**-17, cosine_noise * amplification)
        gaining = [i for i in left if d2[i] / r[i] ** 2 > 2**-17]
        if not gaining:
            break
        best = gaining[0]
        for i in gaining:
            if d2[i] > d2[best]:
                best = i

        noise = {
            i: r[i] ** 2 * cosine_noise * amplification + 2 * d2[i] / r[i] * r_noise[i]
            for i in gaining
        }
        for i in gaining:
            out.observe(d2[best] - d2[i], noise[best] + noise[i])
        row = {}
        for i in tokens:
            known = sum(c[best] * c[i] for c in rows)
            row[i] = (kernel[best, i] - known) / math.sqrt(d2[best])
        amplification += r[best] ** 2 / d2[best]
        for i in tokens:
            d2[i] -= row[i] ** 2
        rows.append(row)
        chosen.append(best)
    rest = [i for i in tokens if i not in chosen]
    missing = min(budget, len(tokens)) - len(chosen)
    chosen += ranked(out, rest, lambda i: r[i], missing, r_noise.__getitem__)
    out.keep = fill(chosen, budget, len(x))
    return out


def _relevance(
    out: Choice, x: Array, t: Array, tokens: list[int]
) -> tuple[dict[int, float], float]:
    """r = (mean cosine - min + 1e-6) / (max - min), 1 where it does not vary; and its noise."""
    queries = [query for query in t if np.isfinite(query).all()]
    mean = {i: sum(cosine(x[i], q) for q in queries) / max(len(queries), 1) for i in tokens}
    return _scaled(out, mean)


def _scaled(out: Choice, value: dict[int, float]) -> tuple[dict[int, float], float]:
    """(value - min + 1e-6) / (max - min), 1 where it does not vary; and its noise."""
    low, high = min(value.values(), default=0.0), max(value.values(), default=0.0)
    out.observe(high - low - 2**-20, NOISE)
    if high - low <= 2**-20:
        return dict.fromkeys(value, 1.0), 0.0
    scaled = {i: (one - low + 1e-6) / (high - low) for i, one in value.items()}
    return scaled, 2 * NOISE / (high - low)


def dart0_reference(x: Array, t: Array, budget: int) -> Choice:
    """Four image and four text pivots by L1 norm; each takes the tokens least like it."""
    out = Choice()
    tokens = _usable(x)
    size = {i: float(np.abs(x[i]).sum()) for i in tokens}
    num_pivots = min(4, budget, len(x))
    pivots = ranked(out, tokens, lambda i: size[i], num_pivots, lambda i: NOISE * size[i])
    for a, b in pairwise(pivots):
        out.observe(size[a] - size[b], NOISE * (size[a] + size[b]))
    # A query token that is not finite comes last and is equally unlike all tokens.
    said = [q if np.isfinite(q).all() else np.zeros_like(q) for q in t]
    length = [float(np.abs(q).sum()) if np.isfinite(q).all() else -1.0 for q in t]
    spoken = ranked(out, range(len(t)), lambda i: length[i], 4, lambda i: NOISE * abs(length[i]))
    for a, b in pairwise(spoken):
        out.observe(length[a] - length[b], NOISE * abs(length[a] + length[b]))

    sources = [x[i] for i in pivots] + [said[i] for i in spoken]
    kept = list(pivots)
    rest = budget - num_pivots
    for number, source in enumerate(sources):
        quota = rest // len(sources) + (1 if number < rest % len(sources) else 0)
        left = [i for i in tokens if i not in kept]
        unlike = {i: -cosine(x[i], source) for i in left}
        kept += ranked(out, left, unlike.__getitem__, quota, lambda _: NOISE)
    out.keep = fill(kept, budget, len(x))
    return out

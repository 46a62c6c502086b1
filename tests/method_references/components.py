"""PruneSID: principal components, suppression, quotas."""

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from tests.method_references.choice import NOISE, Array, Choice, fill

# Loadings are compared in steps of this size, so that equal tokens tie.
STEP = 2.0**-30

# Of the tokens and the number of components: the group of each token, and how much it loads on it.
Grouping = Callable[[Choice, Array, int], tuple[list[int], list[float]]]


def prunesid_reference(
    features: Array, attention: Array | None, budget: int, grouping: Grouping | None = None
) -> Choice:
    """The formulas for a class token's attention, or, without any, those for Qwen.

    `grouping` stands in for the exact principal components.
    """
    out = Choice()
    num_tokens = len(features)
    usable = [
        i
        for i in range(num_tokens)
        if np.isfinite(features[i]).all() and (attention is None or math.isfinite(attention[i]))
    ]
    if len(usable) <= budget:
        out.keep = fill(usable, budget, num_tokens)
        return out
    v = features[usable]
    count = len(usable)

    q = int(budget / 4)
    q = max(q, 4) if attention is None else max(q, 1)
    group, strength = (grouping or _groups)(out, v, q)
    score = strength if attention is None else [float(attention[i]) for i in usable]

    cosines = _cosines(v)
    if attention is not None:
        pairs = [cosines[i][j] for i in range(count) for j in range(i + 1, count)]
        threshold = budget / 32 * sum(pairs) / len(pairs)
    else:
        pairs = [cosines[i][j] for i in range(count) for j in range(i, count)]
        threshold = max(18 * budget / count, 1) * sum(pairs) / count**2
    if abs(threshold - 1) < 1e-12:
        threshold = 1.0

    names = sorted(set(group))
    order: dict[int, list[int]] = {}
    survivors: dict[int, int] = {}
    for g in names:
        left = sorted((i for i in range(count) if group[i] == g), key=lambda i: (-score[i], i))
        for a, b in pairwise(left):
            out.observe(score[a] - score[b], 1.5 * STEP if attention is None else 0.0)
        picked: list[int] = []
        dropped: list[int] = []
        while left:
            best = left.pop(0)
            picked.append(best)
            for i in list(left):
                out.observe(cosines[best][i] - threshold, NOISE * (1 + abs(threshold)))
                if cosines[best][i] > threshold:
                    left.remove(i)
                    dropped.append(i)
        dropped.sort(key=lambda i: (-score[i], i))
        order[g] = picked + dropped
        survivors[g] = len(picked)

    quota = _quota(names, {g: len(order[g]) for g in names}, survivors, budget)
    chosen = [usable[i] for g in names for i in order[g][: quota[g]]]
    assert len(chosen) == budget
    out.keep = sorted(chosen)
    return out


def _cosines(v: Array) -> list[list[float]]:
    """Of all pairs; 1 exactly for equal directions, 0 to a zero token."""
    lengths = np.sqrt((v * v).sum(axis=1))
    units = v / np.where(lengths > 0, lengths, 1.0)[:, None]
    products = units @ units.T
    return np.where(np.abs(products - 1.0) < 1e-12, 1.0, products).tolist()


def _groups(out: Choice, v: Array, q: int) -> tuple[list[int], list[float]]:
    """group(i) = argmax_c |V_ic| of the right singular vectors of the centred sigmoid, (d, N)."""
    x = 1 / (1 + np.exp(-v.T))
    x = x - x.mean(axis=0, keepdims=True)
    _, sigma, vt = np.linalg.svd(x, full_matrices=False)
    eigenvalues = sigma**2
    rank = sum(1 for value in eigenvalues if value > 1e-10 * eigenvalues[0])
    if rank == 0:
        return [0] * v.shape[0], [0.0] * v.shape[0]
    # Equal eigenvalues share a space: what counts is the projection on it.
    spaces: list[list[int]] = [[0]]
    for c in range(1, rank):
        gap = eigenvalues[c - 1] - eigenvalues[c]
        if spaces[-1][0] < q:
            out.observe(gap / eigenvalues[0] - 1e-10, 1e-11)
        if gap > 1e-10 * eigenvalues[0]:
            spaces.append([c])
        else:
            spaces[-1].append(c)
    if rank < min(q, len(eigenvalues)):
        out.observe(eigenvalues[rank] / eigenvalues[0] - 1e-10, 1e-11)
    spaces = [space for space in spaces if space[0] < q]
    group, strength = [], []
    for i in range(v.shape[0]):
        lengths = [math.sqrt(sum(float(vt[c, i]) ** 2 for c in space)) for space in spaces]
        loading = [round(length / STEP) * STEP for length in lengths]
        best = 0
        for c, value in enumerate(loading):
            if value > loading[best]:
                best = c
        for value in loading:
            out.observe(loading[best] - value, 1.5 * STEP)
        group.append(best)
        strength.append(loading[best])
    return group, strength


def _quota(
    names: list[int], size: dict[int, int], survivors: dict[int, int], budget: int
) -> dict[int, int]:
    """One each, the rest in proportion to the survivors, under an upper bound."""
    descending = sorted(names, key=lambda g: (-survivors[g], g))
    if len(names) > budget:
        return {g: 1 if g in descending[:budget] else 0 for g in names}
    upper = {g: min(5 * math.ceil(budget / 64), size[g], survivors[g]) for g in names}
    while sum(upper.values()) < budget:
        upper = {g: min(upper[g] + 1, size[g]) for g in names}
    rest = budget - len(names)
    total = sum(survivors.values())
    quota = {}
    seen = before = 0
    for g in names:
        seen += survivors[g]
        now = int(np.round(np.float64(rest * seen) / total))
        quota[g] = min(1 + now - before, upper[g])
        before = now
    for g in descending:
        while sum(quota.values()) < budget and quota[g] < upper[g]:
            quota[g] += 1
    return quota

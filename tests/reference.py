"""A slow, literal, float64 reading of Algorithm 1, as an oracle. Shares no code with the product.

Written from the paper's listing, line by line, for one image. What the paper only requires is
handled as docs/algorithm.md says: too large a budget, too many groups, no query, zero
directions, values that are not finite.

Every comparison also records how close it was. `Selection.margin` is the smallest distance of a
decision to its opposite, in units of what float32 may get wrong there; at or below 1 another
implementation in float32 may rightly decide otherwise. Values that are exactly equal are ties,
decided by order, and do not count as close.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# What float32 may get wrong in an inner product of unit vectors, and relatively in a score.
_NOISE = 4e-7


@dataclass
class Selection:
    """What Algorithm 1 returns, and what happened on the way."""

    keep: list[int] = field(default_factory=list)
    candidates: list[int] = field(default_factory=list)
    sinks: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)  # -1 for tokens that are no candidates
    saliency: list[float] = field(default_factory=list)
    relevance: list[float] = field(default_factory=list)
    budgets: list[int] = field(default_factory=list)
    stopped_by: str = ""
    num_reseeded: int = 0
    margin: float = math.inf

    def observe(self, distance: float, noise: float) -> None:
        """Record how far a decision was from its opposite; an exact tie is none."""
        if distance != 0.0 and noise > 0.0:
            self.margin = min(self.margin, abs(distance) / noise)


def unit(z: Array) -> Array:
    """unit(z) = z / max(|z|, 1e-12)."""
    return z / max(norm(z), 1e-12)


def norm(z: Array) -> float:
    """Euclidean norm."""
    return math.sqrt(float((z * z).sum()))


def select_reference(
    states: Mapping[int, npt.NDArray[np.floating]],
    visual: npt.NDArray[np.floating],
    query: npt.NDArray[np.floating],
    budget: int,
    profile: Any,
    patches_per_token: int = 1,
    valid: npt.NDArray[np.bool_] | None = None,
) -> Selection:
    """Run Algorithm 1 on one image: states `(N * p, d)`, visual `(N, D)`, query `(Q, D)`.

    `profile` is anything with the fields of an encoder profile.
    """
    out = Selection()
    h = {layer: np.asarray(state, dtype=np.float64) for layer, state in states.items()}
    x, t = np.asarray(visual, dtype=np.float64), np.asarray(query, dtype=np.float64)
    early, late = profile.direction_layers
    start, end = profile.saliency_window
    num_tokens = x.shape[0]
    has_sinks = profile.sink_layer is not None
    used_layers = (early, late, start, end, *([profile.sink_layer + 1] if has_sinks else []))

    # Line 1. A value that is not finite makes a sink, the last to be taken back.
    activation: list[float] = []
    for i in range(num_tokens):
        patches = range(i * patches_per_token, (i + 1) * patches_per_token)
        finite = all(np.isfinite(h[layer][k]).all() for layer in used_layers for k in patches)
        values = [
            abs(h[profile.sink_layer + 1][k][profile.sink_coordinate]) if has_sinks else 0.0
            for k in patches
        ]
        activation.append(max(values) if finite else math.inf)
        if valid is not None and not valid[i]:
            continue
        if activation[i] <= profile.sink_threshold:
            out.candidates.append(i)
        else:
            out.sinks.append(i)
    v = out.candidates

    # Lines 2-6, per patch, then averaged over the patches of a token.
    d: dict[int, Array] = {}
    u: dict[int, float] = {}
    alpha: dict[int, float] = {}
    s: dict[int, float] = {}
    direction_noise: dict[int, float] = {}
    for i in v:
        directions, magnitudes, noise = [], [], _NOISE
        for k in range(i * patches_per_token, (i + 1) * patches_per_token):
            delta = unit(h[late][k]) - unit(h[early][k])
            noise = max(noise, _NOISE / max(norm(delta), 1e-12)) if norm(delta) > 0 else noise
            directions.append(unit(delta))
            magnitudes.append(norm(h[end][k] - h[start][k]))
        if patches_per_token == 1:
            d[i] = directions[0]
        else:
            mean = np.stack(directions).sum(axis=0) / patches_per_token
            d[i] = unit(mean)
            noise = noise / max(norm(mean), 1e-12) if norm(mean) > 0 else noise
        direction_noise[i] = noise
        u[i] = sum(magnitudes) / patches_per_token
        alpha[i] = max((float((unit(x[i]) * unit(tj)).sum()) for tj in t), default=1.0)
        s[i] = alpha[i] * u[i]

    # Line 7. Fewer candidates than groups: as many groups; no direction at all: one group.
    num_groups = min(profile.num_groups, len(v))
    if v and max(norm(d[i]) for i in v) == 0.0:
        num_groups = 1
    label = group_reference(out, v, d, direction_noise, num_groups, profile.seed) if v else {}

    # Lines 14-15.
    spent = min(budget, len(v))
    members: list[list[int]] = [[i for i in v if label[i] == c] for c in range(num_groups)]
    g = [sum(s[i] for i in group) / len(group) if group else 0.0 for group in members]
    score_noise = [
        _NOISE * max((u[i] * max(1.0, abs(alpha[i])) for i in group), default=0.0)
        for group in members
    ]
    top = max(g, default=0.0)
    weights = [math.exp(value - top) for value in g]
    p = [weight / sum(weights) for weight in weights]
    share_noise = _NOISE * (1 + max(map(abs, g), default=0.0)) + 2 * max(score_noise, default=0.0)

    b = share_budget(out, p, [len(group) for group in members], spent, share_noise)
    out.budgets = b

    # Lines 20-21.
    kept: list[int] = []
    for c in range(num_groups):
        ranked = sorted(members[c], key=lambda i: (-s[i], i))
        if 0 < b[c] < len(ranked):
            last, following = ranked[b[c] - 1], ranked[b[c]]
            out.observe(s[last] - s[following], 2 * _NOISE * max(u[last], u[following]))
        kept += ranked[: b[c]]
    # A budget beyond the candidates: sinks, the weakest activation first; then padding.
    rest = sorted(out.sinks, key=lambda i: (activation[i], i))
    rest += [i for i in range(num_tokens) if i not in set(v) | set(out.sinks)]
    out.keep = sorted(kept + rest[: budget - len(kept)])

    out.groups = [label.get(i, -1) for i in range(num_tokens)]
    out.saliency = [u.get(i, math.nan) for i in range(num_tokens)]
    out.relevance = [alpha.get(i, math.nan) for i in range(num_tokens)]
    return out


def share_budget(
    out: Selection, p: list[float], sizes: list[int], spent: int, share_noise: float
) -> list[int]:
    """Lines 16-19: integer budgets of the groups from their shares p."""
    num_groups = len(p)
    # Line 16.
    b = [min(sizes[c], math.floor(spent * p[c])) for c in range(num_groups)]
    left = spent - sum(b)
    remainder = [spent * p[c] - math.floor(spent * p[c]) for c in range(num_groups)]
    quota_noise = [spent * p[c] * share_noise for c in range(num_groups)]
    for c in range(num_groups):
        if p[c] > 0 and math.floor(spent * p[c]) <= sizes[c]:
            out.observe(1.0 - remainder[c], quota_noise[c])
            if math.floor(spent * p[c]) > 0:
                out.observe(remainder[c], quota_noise[c])

    # Lines 17-18.
    visited = [c for c in range(num_groups) if b[c] < sizes[c]]
    visited.sort(key=lambda c: (-remainder[c], c))
    if 0 < left < len(visited):
        last, following = visited[left - 1], visited[left]
        noise = quota_noise[last] + quota_noise[following]
        out.observe(remainder[last] - remainder[following], noise)
    for c in visited:
        if left > 0:
            b[c] += 1
            left -= 1

    # Line 19.
    by_share = sorted(range(num_groups), key=lambda c: (-p[c], c))
    for c in by_share:
        added = min(left, sizes[c] - b[c])
        if added > 0:
            for other in by_share:
                if b[other] < sizes[other]:
                    out.observe(p[c] - p[other], (p[c] + p[other]) * share_noise)
        b[c] += added
        left -= added
    return b


def group_reference(
    out: Selection,
    v: list[int],
    d: dict[int, Array],
    direction_noise: dict[int, float],
    num_groups: int,
    seed: int,
) -> dict[int, int]:
    """Lines 7-13: farthest-point seeding and spherical k-means; returns the label of each token."""
    rows = np.stack([d[i] for i in v])  # (M, d), in original order
    row_noise = np.array([direction_noise[i] for i in v])
    m_count = len(v)

    def products(mu: Array) -> Array:
        values = (rows * mu).sum(axis=1)
        # Equal unit vectors have the product 1; float64 may round it.
        return np.where(np.abs(values - 1.0) < 1e-12, 1.0, values)

    # Farthest-point sampling.
    chosen = [seed % m_count]
    nearest = products(rows[chosen[0]])
    while len(chosen) < num_groups:
        unchosen = [i for i in range(m_count) if i not in set(chosen)]
        best = unchosen[0]
        for i in unchosen:
            if 1 - nearest[i] > 1 - nearest[best]:
                best = i
        for i in unchosen:
            out.observe(nearest[best] - nearest[i], row_noise[i] + row_noise[best])
        chosen.append(best)
        nearest = np.maximum(nearest, products(rows[best]))
    centroids = [rows[i] for i in chosen]
    centroid_noise = [0.0] * num_groups

    def assign() -> tuple[list[int], Array]:
        similarity = np.stack([products(mu) for mu in centroids], axis=1)
        labels = [0] * m_count
        for i in range(m_count):
            for c in range(1, num_groups):
                if similarity[i, c] > similarity[i, labels[i]]:
                    labels[i] = c
            for c in range(num_groups):
                noise = row_noise[i] + centroid_noise[c] + centroid_noise[labels[i]]
                out.observe(similarity[i, labels[i]] - similarity[i, c], noise)
        return labels, similarity[np.arange(m_count), labels]

    labels: list[int] = []
    loss = math.nan
    out.stopped_by = "limit"
    for iteration in range(1, 11):
        previous_labels, previous_loss = labels, loss
        labels, m = assign()
        loss = float((1 - m).sum()) / m_count
        if iteration > 1:
            change = abs(previous_loss - loss) / max(abs(previous_loss), 1e-12)
            if labels == previous_labels:
                out.stopped_by = "labels"
                break
            # Errors of single tokens average out; one of a centroid is orthogonal to its sum.
            loss_noise = norm(row_noise) / m_count + _NOISE * abs(previous_loss)
            out.observe(change - 1e-5, loss_noise / max(abs(previous_loss), 1e-12))
            if change < 1e-5:
                out.stopped_by = "loss"
                break
        lonely = sorted(range(m_count), key=lambda i: (m[i], i))
        num_empty = 0
        noise_before = list(centroid_noise)
        for c in range(num_groups):
            inside = [i for i in range(m_count) if labels[i] == c]
            if inside:
                total = rows[inside].sum(axis=0)
                centroids[c] = unit(total)
                spread = norm(row_noise[inside]) / max(norm(total), 1e-12)
                centroid_noise[c] = spread if norm(total) > 0 else 0.0
            else:
                token = lonely[num_empty]
                for i in lonely[num_empty + 1 :]:
                    noise = row_noise[i] + row_noise[token]
                    noise += noise_before[labels[i]] + noise_before[labels[token]]
                    out.observe(m[i] - m[token], noise)
                centroids[c] = rows[token]
                centroid_noise[c] = 0.0
                num_empty += 1
        out.num_reseeded += num_empty
    labels, _ = assign()
    return {i: labels[k] for k, i in enumerate(v)}

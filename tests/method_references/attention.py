"""Methods that read attention: cls_attention, HiPrune, VisionZip."""

import math

import numpy as np

from tests.method_references.choice import NOISE, Array, Choice, cosine, fill, ranked


def _per_token(values: Array, patches: int) -> list[float]:
    return [
        sum(float(values[i * patches + k]) for k in range(patches)) / patches
        for i in range(len(values) // patches)
    ]


def cls_attention_reference(attention: Array, budget: int, patches: int = 1) -> Choice:
    """The B highest scores."""
    out = Choice()
    score = _per_token(attention, patches)
    usable = [i for i, s in enumerate(score) if math.isfinite(s)]
    chosen = ranked(out, usable, lambda i: score[i], budget, lambda i: NOISE * abs(score[i]))
    out.keep = fill(chosen, budget, len(score))
    return out


def hiprune_reference(
    middle: Array, deep: Array, grid_width: int, budget: int, patches: int = 1
) -> Choice:
    """Anchors by the middle layer, their neighbours in the grid, registers by the deep layer."""
    out = Choice()
    objects, registers = _per_token(middle, patches), _per_token(deep, patches)
    num_tokens = len(objects)
    usable = [
        i for i in range(num_tokens) if math.isfinite(objects[i]) and math.isfinite(registers[i])
    ]
    num_anchors = round(0.1 * budget / 5)
    anchors = ranked(
        out, usable, lambda i: objects[i], num_anchors, lambda i: NOISE * abs(objects[i])
    )
    members = list(anchors)
    for anchor in anchors:
        row, column = divmod(anchor, grid_width)
        for r, c in ((row, column - 1), (row, column + 1), (row - 1, column), (row + 1, column)):
            neighbour = r * grid_width + c
            if r >= 0 and 0 <= c < grid_width and neighbour in usable and neighbour not in members:
                members.append(neighbour)
    left = [i for i in range(num_tokens) if math.isfinite(registers[i]) and i not in members]
    members += ranked(
        out,
        left,
        lambda i: registers[i],
        budget - len(members),
        lambda i: NOISE * abs(registers[i]),
    )
    out.keep = fill(members, budget, num_tokens)
    return out


def visionzip_reference(
    attention: Array, keys: Array, features: Array, budget: int, patches: int = 1
) -> Choice:
    """D dominant tokens by attention; C targets among the rest, each plus the mean of its own."""
    out = Choice()
    score = _per_token(attention, patches)
    num_tokens = len(score)
    metric = [
        sum((keys[i * patches + k] for k in range(patches)), np.zeros(keys.shape[1])) / patches
        for i in range(num_tokens)
    ]
    usable = [
        i
        for i in range(num_tokens)
        if math.isfinite(score[i])
        and np.isfinite(metric[i]).all()
        and np.isfinite(features[i]).all()
    ]
    # 54 dominant tokens to 10 contextual ones; at least one of each, a single token is dominant.
    num_contextual = min(max(1, round(budget * 10 / 64)), budget - 1)
    num_dominant = budget - num_contextual
    dominant = ranked(
        out, usable, lambda i: score[i], num_dominant, lambda i: NOISE * abs(score[i])
    )
    dominant = fill(dominant, num_dominant, num_tokens)
    rest = [i for i in usable if i not in dominant]
    if num_contextual and len(rest) >= num_contextual:
        step = max(1, len(rest) // num_contextual)
        targets = rest[::step][:num_contextual]
    else:
        others = [i for i in range(num_tokens) if i not in dominant and i not in rest]
        targets = (rest + others)[:num_contextual]
    assigned: dict[int, list[int]] = {target: [] for target in targets}
    attracting = [target for target in targets if target in usable]
    for i in rest:
        if i in targets or not attracting:
            continue
        best = attracting[0]
        for target in sorted(attracting):
            if cosine(metric[i], metric[target]) > cosine(metric[i], metric[best]):
                best = target
        for target in attracting:
            out.observe(
                cosine(metric[i], metric[best]) - cosine(metric[i], metric[target]), 2 * NOISE
            )
        assigned[best].append(i)
    out.keep = sorted(dominant + targets)
    for i in out.keep:
        row = features[i].copy()
        if assigned.get(i):
            row = row + sum(features[j] for j in assigned[i]) / len(assigned[i])
        out.rows.append(row)
    return out

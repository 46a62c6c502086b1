"""Methods that read how states change: Representation Shift and the reconstruction of EvoCut."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.method_references.choice import NOISE, Array, Choice, cosine, fill, ranked
from tests.reference import Selection, group_reference, norm, unit


def _sinks(state: Array, profile: Any, patches: int) -> list[bool]:
    return [
        any(
            not np.isfinite(state[k]).all()
            or abs(state[k][profile.sink_coordinate]) > profile.sink_threshold
            for k in range(i * patches, (i + 1) * patches)
        )
        for i in range(len(state) // patches)
    ]


def representation_shift_reference(
    shift: Array,
    sink_state: Array,
    profile: Any,
    budget: int,
    patches: int = 1,
) -> Choice:
    """The largest norm of what an operation adds, mean over patches; sinks last."""
    out = Choice()
    sink = _sinks(sink_state, profile, patches)
    num_tokens = len(sink)
    score = [
        sum(float(shift[i * patches + k]) for k in range(patches)) / patches
        for i in range(num_tokens)
    ]
    return _choose(out, score, sink, budget, [NOISE * abs(s) for s in score])


def evocut_reference(
    states: Mapping[int, Array],
    profile: Any,
    budget: int,
    patches: int = 1,
) -> Choice:
    """1 - cosine of each update to the centre of its cluster, summed over layers; sinks last."""
    out = Choice()
    early, late = profile.direction_layers
    sink = _sinks(states[profile.sink_layer + 1], profile, patches)
    num_tokens = len(sink)
    finite = [
        all(np.isfinite(h[i * patches : (i + 1) * patches]).all() for h in states.values())
        for i in range(num_tokens)
    ]
    v = [i for i in range(num_tokens) if finite[i] and not sink[i]]
    total = [0.0] * num_tokens
    noise = [NOISE] * num_tokens
    for layer in range(early, late):
        if layer == profile.sink_layer or not v:
            continue
        d: dict[int, Array] = {}
        for i in v:
            updates = [
                unit(states[layer + 1][k] - states[layer][k])
                for k in range(i * patches, (i + 1) * patches)
            ]
            d[i] = updates[0] if patches == 1 else unit(np.stack(updates).sum(axis=0) / patches)
        num_groups = min(profile.num_groups, len(v))
        if max(norm(d[i]) for i in v) == 0.0:
            num_groups = 1
        seen = Selection()
        blur = dict.fromkeys(v, NOISE)
        label = group_reference(seen, v, d, blur, num_groups, profile.seed)
        out.margin = min(out.margin, seen.margin)
        for i in v:
            centre = unit(sum((d[j] for j in v if label[j] == label[i]), np.zeros_like(d[i])))
            total[i] += 1.0 - cosine(d[i], centre)
            noise[i] += NOISE
    score = [total[i] if finite[i] else math.nan for i in range(num_tokens)]
    return _choose(out, score, sink, budget, noise)


def _choose(
    out: Choice,
    score: list[float],
    sink: list[bool],
    budget: int,
    noise: list[float],
) -> Choice:
    """The highest finite scores, then sinks by score, then the rest."""
    usable = [i for i in range(len(score)) if math.isfinite(score[i])]
    chosen: list[int] = []
    for is_sink in (False, True):
        tier = [i for i in usable if sink[i] == is_sink]
        count = min(budget - len(chosen), len(tier))
        chosen += ranked(out, tier, lambda i: score[i], count, lambda i: noise[i])
    out.keep = fill(chosen, budget, len(score))
    return out

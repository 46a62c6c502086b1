"""What a request costs the engine in seconds, learnt from the first tokens that it gives.

Prompts are served in the order they come, so the gap between two first tokens is the service time
of the later one: a per request, p per computed prompt token, e per encoder token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from server.adaptive.state import NUM_TERMS, Load

# A request, a thousand prompt tokens, a thousand encoder tokens: terms of one order of magnitude.
_UNITS = np.array([1.0, 1000.0, 1000.0])
# A start for the estimate, in seconds per unit: a fast machine, so that nobody is pruned for want
# of knowledge. A few dozen measurements outweigh it.
_PRIOR = np.array([0.002, 0.005, 0.0025])
_PRIOR_WEIGHT = 0.1
_FORGETTING = 0.99
# First tokens that come closer than this were computed in one step.
_SAME_STEP_SECONDS = 0.002


class Costs:
    """Seconds per request, per prompt token and per encoder token, as far as they are known."""

    def __init__(self, load: Load) -> None:
        self._per_term = (_coefficients(load) / _UNITS).tolist()

    def seconds(self, requests: float, tokens: float, encoder_tokens: float) -> float:
        """Predict the time that the engine takes for an amount of work."""
        per_request, per_token, per_encoder_token = self._per_term
        return float(
            requests * per_request + tokens * per_token + encoder_tokens * per_encoder_token
        )


def _coefficients(load: Load) -> np.ndarray:
    """Solve the least squares of what was measured, pulled to the prior; no cost is negative."""
    gram = np.array(load.gram).reshape(NUM_TERMS, NUM_TERMS) + np.eye(NUM_TERMS) * _PRIOR_WEIGHT
    moment = np.array(load.moment) + _PRIOR * _PRIOR_WEIGHT
    free = list(range(NUM_TERMS))
    result = np.zeros(NUM_TERMS)
    while free:
        solved = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
        if (solved >= 0).all():
            result[free] = solved
            break
        # A negative cost is noise: without that term the others carry it.
        free.pop(int(solved.argmin()))
    return result


def learn(load: Load, work: Sequence[float], sent: float, now: float) -> None:
    """Take in a first token: `work` was sent at `sent` and is finished `now`."""
    if now - load.last_first_token > _SAME_STEP_SECONDS:
        _close_group(load)
        load.group_gap = now - max(load.last_first_token, sent)
        load.last_first_token = now
    for term in range(NUM_TERMS):
        load.group_work[term] += work[term]


def _close_group(load: Load) -> None:
    terms = np.array(load.group_work) / _UNITS
    if terms.any():
        load.gram[:] = list(np.array(load.gram) * _FORGETTING + np.outer(terms, terms).ravel())
        load.moment[:] = list(np.array(load.moment) * _FORGETTING + terms * load.group_gap)
    load.group_work[:] = [0.0] * NUM_TERMS

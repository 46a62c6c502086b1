"""Scores: accuracy, the paper's relative accuracy, and intervals that respect the scenes.

Questions about one scene share its picture, so scenes are what is resampled, and every method is
resampled with the same scenes: what two methods have in common cancels in their difference.
"""

from dataclasses import dataclass

import numpy as np

NUM_RESAMPLES = 2000
_LEVELS = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its 95 % interval; all three are None where there is nothing to measure."""

    value: float | None
    low: float | None
    high: float | None


def resample(num_scenes: int, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> np.ndarray:
    """Return how often each scene counts, `(1 + num_resamples, S)`; row 0 counts each once."""
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(num_scenes, np.full(num_scenes, 1 / num_scenes), size=num_resamples)
    return np.concatenate([np.ones((1, num_scenes)), drawn])


def accuracy_by_kind(right: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the share of right answers of each kind, `(W, K)`, NaN where a kind is not asked.

    Args:
        right: `(S, K)`, 1 or 0, NaN where the scene has no question of the kind.
        weights: `(W, S)` from `resample`.
    """
    asked = weights @ ~np.isnan(right)
    return _ratio(weights @ np.nan_to_num(right), asked)


def overall_accuracy(right: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the share of right answers among all questions, `(W,)`."""
    asked = weights @ (~np.isnan(right)).sum(axis=1)
    hits = weights @ np.nan_to_num(right).sum(axis=1)
    return _ratio(hits, asked)


def relative_accuracy(accuracy: np.ndarray, unpruned: np.ndarray) -> np.ndarray:
    """Return the paper's RelAcc. as a fraction, `(W,)`: the mean over kinds of the ratio.

    Every kind counts as one benchmark; one that the unpruned model never answers is left out.
    """
    usable = unpruned > 0  # False for NaN
    ratios = np.where(usable, _ratio(accuracy, unpruned), 0.0)
    return _ratio(ratios.sum(axis=1), usable.sum(axis=1))


def estimate(values: np.ndarray) -> Estimate:
    """Return row 0 as the value, percentiles of the other rows as its interval."""
    resampled = values[1:][~np.isnan(values[1:])]
    if np.isnan(values[0]) or not len(resampled):
        return Estimate(None, None, None)
    low, high = np.percentile(resampled, _LEVELS)
    return Estimate(float(values[0]), float(low), float(high))


def _ratio(over: np.ndarray, under: np.ndarray) -> np.ndarray:
    """Return the quotient, NaN where there is nothing to divide by."""
    quotient = np.full(over.shape, np.nan)
    np.divide(over, under, out=quotient, where=under > 0)
    return quotient

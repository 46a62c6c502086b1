"""Coverage: what of an image's things and classes the kept tokens still show."""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from msdg_vllm.calibration.looking import centre_prior
from msdg_vllm.calibration.masks import Annotation
from msdg_vllm.calibration.tower import Encoded, TowerInfo
from msdg_vllm.core import SelectionOptions, analyze_image, num_kept_tokens, take_tokens
from msdg_vllm.core.analysis import ImageSignals
from msdg_vllm.core.profiles import EncoderProfile
from msdg_vllm.core.selection import TokenScores
from msdg_vllm.methods import Encoder, Image, Signals, method_named

RETENTIONS = (Fraction(1, 3), Fraction(2, 9), Fraction(1, 9))
MEASURES = ("instance area", "instances hit", "classes present")
PROFILE, SCALED, OUTPUT = "this profile", "u scaled to a mean of 1", "groups of output features"
UNRANKED = "groups, equal shares, random ranking"
DIVPRUNE, RANDOM = "DivPrune on output features", "random"
_SHOWN = 0.5  # a token shows an instance that covers half of it
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Kept:
    """What every way of choosing keeps of one image, by retention; and what the profile saw."""

    tokens: dict[str, list[Indices]]
    signals: ImageSignals


@torch.no_grad()
def keep_by_all(encoded: Encoded, profile: EncoderProfile, info: TowerInfo, scale: float) -> Kept:
    """Choose tokens without a query: by the profile, by variants of it, and by simpler ways.

    Args:
        encoded: The image after the tower.
        profile: The profile to look at.
        info: The tower.
        scale: The `saliency_scale` that would give u a mean of 1.
    """
    states = dict(enumerate(encoded.states))
    num_tokens = len(encoded.valid)
    valid = torch.from_numpy(encoded.valid).to(states[0].device)
    paper = SelectionOptions()
    constant = SelectionOptions(saliency="given", rank_by="random", allocate_by="saliency")
    given = torch.ones(num_tokens * info.patches_per_token, device=valid.device)

    def chosen(variant: EncoderProfile, options: SelectionOptions) -> tuple[list[Indices], Any]:
        signals = analyze_image(
            states,
            variant,
            info.patches_per_token,
            valid=valid,
            saliency=given if options.saliency == "given" else None,
            options=options,
        )
        scores = TokenScores(torch.ones_like(signals.saliency), signals.saliency)
        budgets = [num_kept_tokens(int(encoded.valid.sum()), float(r)) for r in RETENTIONS]
        kept = [take_tokens(signals, scores, budget, options) for budget in budgets]
        return [indices.cpu().numpy() for indices in kept], signals

    # Without saliency a query ranks inside groups; without both, nothing but the order would.
    ours, signals = chosen(profile, constant if profile.saliency_window is None else paper)
    variants = {PROFILE: ours}
    if profile.saliency_window is not None:
        variants[SCALED] = chosen(replace(profile, saliency_scale=scale), paper)[0]
        variants[OUTPUT] = chosen(profile, SelectionOptions(grouping="output"))[0]
        variants["top u, no groups"] = chosen(profile, SelectionOptions(grouping="none"))[0]
    else:
        output = SelectionOptions(
            grouping="output", saliency="given", rank_by="random", allocate_by="saliency"
        )
        variants[OUTPUT] = chosen(profile, output)[0]
    variants[UNRANKED] = chosen(profile, constant)[0]
    places = np.flatnonzero(encoded.valid)
    budgets = [num_kept_tokens(len(places), float(r)) for r in RETENTIONS]
    variants[DIVPRUNE] = _divprune(encoded, info, profile, places, budgets)
    variants["centre of the image"] = _top(centre_prior(encoded.grid)[places], places, budgets)
    order = np.random.default_rng(0).random(len(places))
    variants[RANDOM] = _top(order, places, budgets)
    return Kept(variants, signals)


def measure(kept: Indices, annotation: Annotation, valid: NDArray[np.bool_]) -> list[float]:
    """Return the three `MEASURES` of the kept tokens; NaN for what the image does not have.

    An instance is hit when a kept token shows it, that is, when it covers half of the token or
    the token is the one it covers most. A class is present when a kept token has its label.
    """
    areas = annotation.instances
    area = hit = float("nan")
    if len(areas):
        area = float((areas[:, kept].sum(axis=1) / areas.sum(axis=1)).mean())
        shows = (areas >= _SHOWN) | (areas == areas.max(axis=1, keepdims=True))
        hit = float(shows[:, kept].any(axis=1).mean())
    classes = set(annotation.labels[valid].tolist()) - {-1}
    left = set(annotation.labels[kept].tolist()) & classes
    return [area, hit, len(left) / len(classes) if classes else float("nan")]


def effective_groups(signals: ImageSignals) -> float:
    """Return how many groups share the budget: the perplexity of the softmax over their means."""
    groups, saliency = signals.groups.cpu().numpy(), signals.saliency.double().cpu().numpy()
    names = np.unique(groups[groups >= 0])
    means = np.array([saliency[groups == name].mean() for name in names])
    shares = np.exp(means - means.max())
    shares /= shares.sum()
    return float(np.exp(-(shares * np.log(np.maximum(shares, 1e-300))).sum()))


def _top(scores: NDArray[Any], places: Indices, budgets: list[int]) -> list[Indices]:
    order = np.argsort(-scores, kind="stable")
    return [np.sort(places[order[:budget]]) for budget in budgets]


def _divprune(
    encoded: Encoded, info: TowerInfo, profile: EncoderProfile, places: Indices, budgets: list[int]
) -> list[Indices]:
    features = encoded.states[-1].float()
    tokens: Tensor = features.unflatten(0, (-1, info.patches_per_token)).mean(dim=1)
    image = Image(
        signals=Signals(),
        visual=tokens[torch.from_numpy(places).to(tokens.device)],
        encoder=Encoder(info.num_layers, profile, patches_per_token=info.patches_per_token),
    )
    method = method_named("divprune")
    return [places[method.select(image, budget).indices.cpu().numpy()] for budget in budgets]

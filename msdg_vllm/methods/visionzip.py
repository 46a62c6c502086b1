"""VisionZip (Yang et al., 2024): dominant tokens as they are, the others merged into a few.

It needs one row of attention and the keys of the same layer, never a map of tokens by tokens.
"""

import torch
from torch import Tensor

from msdg_vllm.core.signals import row_norms
from msdg_vllm.core.tiles import NARROW_TILE, fill_up, round_up
from msdg_vllm.methods.image import Image, Selection, top_tokens
from msdg_vllm.methods.merging import group_means
from msdg_vllm.methods.method import Method
from msdg_vllm.methods.needs import Encoder, Needs
from msdg_vllm.methods.similarity import UnitTokens, snap

# The original keeps 54 dominant tokens to 10 contextual ones.
_CONTEXTUAL_SHARE = 10 / 64


class VisionZip(Method):
    """The most attended tokens, and a few that stand for all others.

    Of the tokens that are not dominant, evenly spaced ones are targets. Every other one goes to
    the target with the most similar key; a target becomes its own feature plus the mean of those
    that went to it. Features are merged in front of the projector, or behind it where that
    reads several patches at once. What is not finite is merged into nothing. Waits for no device.

    Without a class token a token's attention is what it receives.
    """

    def needs(self, encoder: Encoder) -> Needs:
        layers = (_layer(encoder),)
        return Needs(
            class_attention=layers if encoder.has_class_token else (),
            received_attention=() if encoder.has_class_token else layers,
            keys=layers,
            features=encoder.patches_per_token == 1,
            visual=True,
            merging=True,
        )

    def select(self, image: Image, budget: int) -> Selection:
        layer, signals = _layer(image.encoder), image.signals
        by_class = image.encoder.has_class_token
        attention = signals.class_attention if by_class else signals.received_attention
        scores = image.per_token(attention[layer])
        metric = UnitTokens.of(image.per_token(signals.keys[layer]))
        source = image.visual
        if image.project is not None:
            assert signals.features is not None
            source = signals.features
        features = source.float()
        finite = metric.finite & scores.isfinite() & row_norms(features).isfinite()

        num_contextual = num_contextual_tokens(budget)
        dominant = top_tokens(torch.where(finite, scores, torch.nan), budget - num_contextual)
        if not num_contextual:
            return Selection(dominant, scores=scores)
        is_dominant = torch.zeros_like(finite).scatter(0, dominant, True)
        targets = _targets(is_dominant, finite, num_contextual)
        merging = finite & ~is_dominant.scatter(0, targets, True)
        merged = _merged(metric, features, targets, finite, merging).to(source.dtype)
        if image.project is not None:
            merged = image.project(merged)
        indices, order = torch.cat([dominant, targets]).sort()
        rows = torch.cat([image.visual.index_select(0, dominant), merged])
        return Selection(indices, embeddings=rows.index_select(0, order), scores=scores)


def num_contextual_tokens(budget: int) -> int:
    """Return how many tokens of a budget are merged ones: at least 1, but never all."""
    return min(max(1, round(budget * _CONTEXTUAL_SHARE)), budget - 1)


def _layer(encoder: Encoder) -> int:
    return encoder.last_layer if encoder.has_class_token else encoder.global_layer_near(1.0)


def _targets(is_dominant: Tensor, finite: Tensor, num_contextual: int) -> Tensor:
    """Evenly spaced tokens among the finite ones that are not dominant, `(C,)` ascending."""
    rest = torch.where(finite, 0, 1).masked_fill(is_dominant, 2).argsort(stable=True)
    num_finite = (finite & ~is_dominant).sum()
    step = num_finite.div(num_contextual, rounding_mode="floor").clamp_min(1)
    # With fewer finite ones than targets the step is 1 and others follow.
    places = torch.arange(num_contextual, device=rest.device) * step
    return rest.gather(0, places).sort().values


def _merged(
    metric: UnitTokens, features: Tensor, targets: Tensor, finite: Tensor, merging: Tensor
) -> Tensor:
    """Each target's feature plus the mean of the features that go to it, `(C, d)`."""
    num_targets = len(targets)
    centres = fill_up(metric.units.index_select(0, targets), round_up(num_targets, NARROW_TILE))
    cosines = snap(metric.units @ centres.T)[: len(features), :num_targets]
    # A target that is not finite attracts nothing; argmax returns the first of equal values.
    cosines = cosines.masked_fill(~finite.index_select(0, targets), -torch.inf)
    label = cosines.argmax(dim=-1).masked_fill(~merging, num_targets)
    return features.index_select(0, targets) + group_means(features, label, num_targets)

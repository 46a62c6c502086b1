"""A reconstruction of EvoCut: the tokens that move unlike the others of their kind.

Only the idea is public: cluster the updates of adjacent layers, score a token by its deviation from
its own cluster, accumulate over the layers. The clustering (MSDG-Prune's), the number of clusters,
the choice of layers and the accumulation (a plain sum) are ours.
"""

import torch
from torch import Tensor

from msdg_vllm.core.grouping import group_tokens
from msdg_vllm.core.profiles import EncoderProfile
from msdg_vllm.core.signals import row_norms, unit
from msdg_vllm.core.tiles import NARROW_TILE, TILE, fill_up, round_up
from msdg_vllm.methods.image import Image, Selection, top_tokens
from msdg_vllm.methods.method import Method
from msdg_vllm.methods.needs import Encoder, Needs
from msdg_vllm.methods.similarity import snap
from msdg_vllm.methods.sinks import sink_states, sink_tokens


class EvoCut(Method):
    """The largest deviation of updates from the centres of their clusters, summed over layers.

    Sinks are kept only for lack of others. Waits for no device.
    """

    reads_profile = True

    def needs(self, encoder: Encoder) -> Needs:
        profile = encoder.measured
        ends = {end for layer in _layers(profile) for end in (layer, layer + 1)}
        return Needs(states=tuple(sorted({*ends, *sink_states(profile)})))

    def select(self, image: Image, budget: int) -> Selection:
        profile, states = image.encoder.measured, image.signals.states
        patches = image.encoder.patches_per_token
        needed = self.needs(image.encoder).states
        finite = torch.stack([row_norms(states[n].float()).isfinite() for n in needed])
        finite = finite.all(dim=0).view(-1, patches).all(dim=-1)
        sinks = sink_tokens(image)
        candidates = finite & ~sinks
        total = torch.zeros_like(candidates, dtype=torch.float32)
        for layer in _layers(profile):
            update = states[layer + 1].float() - states[layer].float()
            directions = image.per_token(unit(update, row_norms(update)))
            if patches > 1:
                directions = unit(directions, row_norms(directions))
            directions = directions.masked_fill(~candidates.unsqueeze(-1), 0.0)
            total = total + _deviations(directions, candidates, profile)
        scores = torch.where(finite, total, torch.nan)
        return Selection(top_tokens(scores, budget, last=sinks), scores=total, sinks=sinks)


def _layers(profile: EncoderProfile) -> tuple[int, ...]:
    """The layers whose updates count: from the early to the late one, but for the sink layer."""
    early, late = profile.direction_layers
    return tuple(layer for layer in range(early, late) if layer != profile.sink_layer)


def _deviations(directions: Tensor, candidates: Tensor, profile: EncoderProfile) -> Tensor:
    """1 - cosine of each direction `(N, d)` to the centre of its cluster, `(N,)`."""
    num_tokens = len(candidates)
    max_groups = min(profile.num_groups, num_tokens)
    any_moved = (row_norms(directions) > 0).any()
    num_groups = torch.where(any_moved, max_groups, 1).minimum(candidates.sum()).unsqueeze(0)
    labels = group_tokens(
        [directions], candidates.unsqueeze(0), num_groups, max_groups, profile.seed
    ).squeeze(0)
    groups = torch.arange(round_up(max_groups, NARROW_TILE), device=labels.device)
    members = fill_up((groups.unsqueeze(-1) == labels).float(), len(groups))  # (K', N')
    sums = members @ fill_up(directions, round_up(num_tokens, TILE))
    centres = unit(sums, row_norms(sums))[:, : directions.shape[-1]]
    own = centres.index_select(0, labels.clamp_min(0))
    return 1.0 - snap((own * directions).sum(dim=-1))

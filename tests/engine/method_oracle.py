"""What the literal references of the methods keep, given what a Hugging Face tower shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from msdg_vllm.core.profiles import EncoderProfile
from tests.method_references.attention import (
    cls_attention_reference,
    hiprune_reference,
    visionzip_reference,
)
from tests.method_references.choice import Array, Choice
from tests.method_references.components import prunesid_reference
from tests.method_references.dynamics import evocut_reference, representation_shift_reference
from tests.method_references.greedy import (
    cdpruner_reference,
    cen_cdpruner_reference,
    cen_divprune_reference,
    dart0_reference,
    divprune_reference,
)
from tests.method_references.scaling import pool_reference


@dataclass
class TowerView:
    """One image as a tower shows it; everything per patch, in raster order of tokens.

    Attributes:
        states: The state that enters each layer.
        visual: Projected tokens.
        query: Query embeddings.
        last: Layers run from 0 to this one.
        middle: The layer that HiPrune takes its anchors from.
        grid_width: Tokens in a row of the picture.
        class_attention: Of the last layer; None without a class token.
        received: Attention that patches receive, by layer.
        keys: Keys of the last layer, averaged over heads.
        updates: What each layer's MLP adds, by layer.
        patches: Patches to a token.
        num_frames: Frames of a video, each a grid of its own.
    """

    states: dict[int, torch.Tensor]
    visual: torch.Tensor
    query: torch.Tensor
    last: int
    middle: int
    grid_width: int
    class_attention: torch.Tensor | None = None
    received: dict[int, torch.Tensor] = field(default_factory=dict)
    keys: torch.Tensor | None = None
    updates: dict[int, torch.Tensor] = field(default_factory=dict)
    patches: int = 1
    num_frames: int = 1

    @property
    def grids(self) -> list[tuple[int, int]]:
        """Rows and columns of the tokens of each frame."""
        rows = len(self.visual) // (self.num_frames * self.grid_width)
        return [(rows, self.grid_width)] * self.num_frames


def choose(name: str, view: TowerView, profile: EncoderProfile, budget: int) -> Choice:
    """What a method other than MSDG-Prune keeps; fails when that is too close to call."""
    choice = _CHOICES[name](view, profile, budget)
    assert choice.is_clear, "a decision too close for float32: choose another picture"
    return choice


@contextmanager
def recorded(modules: dict[int, nn.Module]) -> Iterator[dict[int, torch.Tensor]]:
    """Fill the yielded dict with what each module puts out."""
    outputs: dict[int, torch.Tensor] = {}
    hooks = [
        module.register_forward_hook(
            lambda _module, _inputs, output, key=key: outputs.update({key: output.clone()})
        )
        for key, module in modules.items()
    ]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def attention_map(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Softmax of all products, averaged over heads, in float64: `(T, T)` from `(T, heads, c)`."""
    products = torch.einsum("qhc,khc->hqk", query.double(), key.double())
    return (products / query.shape[-1] ** 0.5).softmax(dim=-1).mean(dim=0)


def _array(tensor: torch.Tensor | None) -> Array:
    assert tensor is not None
    array: Array = tensor.double().numpy()
    return array


def _hiprune(view: TowerView, profile: EncoderProfile, budget: int) -> Choice:
    middle, deep = (_array(view.received[layer]) for layer in (view.middle, view.last))
    return hiprune_reference(middle, deep, view.grid_width, budget, view.patches)


def _visionzip(view: TowerView, profile: EncoderProfile, budget: int) -> Choice:
    has_class_token = view.class_attention is not None
    return visionzip_reference(
        _array(view.class_attention if has_class_token else view.received[view.last]),
        _array(view.keys),
        # A projector of single patches takes merged features; others take only whole tokens.
        _array(
            view.states[view.last + 1] if has_class_token and view.patches == 1 else view.visual
        ),
        budget,
        view.patches,
    )


def _prunesid(view: TowerView, profile: EncoderProfile, budget: int) -> Choice:
    if view.class_attention is None:
        return prunesid_reference(_array(view.visual), None, budget)
    features, attention = (
        _array(values).reshape(len(view.visual), view.patches, -1).mean(axis=1)
        for values in (view.states[view.last + 1], view.class_attention)
    )
    return prunesid_reference(features, attention[:, 0], budget)


def _representation_shift(view: TowerView, profile: EncoderProfile, budget: int) -> Choice:
    layer = sum(profile.saliency_window) // 2
    return representation_shift_reference(
        _array(view.updates[layer].norm(dim=-1)),
        _array(view.states[profile.sink_layer + 1]),
        profile,
        budget,
        view.patches,
    )


def _evocut(view: TowerView, profile: EncoderProfile, budget: int) -> Choice:
    early, late = profile.direction_layers
    states = {layer: _array(view.states[layer]) for layer in range(early, late + 1)}
    return evocut_reference(states, profile, budget, view.patches)


_CHOICES: dict[str, Callable[[TowerView, EncoderProfile, int], Choice]] = {
    "cls_attention": lambda view, profile, budget: cls_attention_reference(
        _array(view.class_attention), budget, view.patches
    ),
    "visionzip": _visionzip,
    "divprune": lambda view, profile, budget: divprune_reference(_array(view.visual), budget),
    "prunesid": _prunesid,
    "hiprune": _hiprune,
    "cdpruner": lambda view, profile, budget: cdpruner_reference(
        _array(view.visual), _array(view.query), budget
    ),
    "evocut": _evocut,
    "representation_shift": _representation_shift,
    "dart0": lambda view, profile, budget: dart0_reference(
        _array(view.visual), _array(view.query), budget
    ),
    "cen_divprune": lambda view, profile, budget: cen_divprune_reference(
        _array(view.visual), budget
    ),
    "cen_cdpruner": lambda view, profile, budget: cen_cdpruner_reference(
        _array(view.visual), _array(view.query), budget
    ),
    "pool": lambda view, profile, budget: pool_reference(_array(view.visual), view.grids, budget),
}

REFERENCED: Sequence[str] = tuple(_CHOICES)
"""Methods that `choose` knows."""


def merged_rows(choice: Choice, like: Any) -> torch.Tensor:
    """The rows of a merging method, in the type of `like`."""
    return torch.stack([torch.from_numpy(row) for row in choice.rows]).to(like.dtype)

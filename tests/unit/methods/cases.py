"""Seeded images for the tests of the methods, and what the references make of them."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from msdg_vllm.methods import Encoder, Image, Signals
from tests.method_references.attention import (
    cls_attention_reference,
    hiprune_reference,
    visionzip_reference,
)
from tests.method_references.choice import Array
from tests.method_references.choice import Choice as Expected
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
from tests.unit.core.cases import make_profile

KINDS = ("random", "clustered", "copies", "flat", "zero", "broken")
NUM_LAYERS = 6
# Of the encoder below: the middle and the last layer that HiPrune and others read.
MIDDLE, LAST = 2, 5


def make_encoder(*, with_class_token: bool = True, num_groups: int = 4) -> Encoder:
    """An encoder of six layers: with a class token as in LLaVA, else four patches to a token."""
    return Encoder(
        num_layers=NUM_LAYERS,
        profile=make_profile(num_groups),
        has_class_token=with_class_token,
        patches_per_token=1 if with_class_token else 4,
    )


def make_image(
    seed: int, kind: str, *, with_class_token: bool = True, num_tokens: int | None = None
) -> Image:
    """Draw an image: all signals of all layers, and a question or none."""
    draw = random.Random(f"{seed} {kind}")
    generator = torch.Generator().manual_seed(seed)
    encoder = make_encoder(with_class_token=with_class_token, num_groups=draw.randint(1, 9))
    count = num_tokens or draw.choice([1, 2, draw.randint(3, 12), draw.randint(12, 40)])
    width, llm_width = draw.randint(2, 40), draw.randint(2, 40)
    # Which of the drawn patches each token shows: equal numbers are equal tokens.
    source = torch.arange(count)
    if kind == "copies":
        other = torch.randint(count, (count,), generator=generator)
        source = torch.where(torch.rand(count, generator=generator) < 0.5, other, source)
    elif kind == "flat":
        source = torch.zeros_like(source)
    centres = torch.randint(max(1, count // 5), (count,), generator=generator)
    broken = torch.rand(count, generator=generator) < draw.choice([0.1, 0.9])
    patches = encoder.patches_per_token

    def tokens(*shape: int, per_token: int = patches) -> Tensor:
        values = torch.randn(count, per_token, *shape, generator=generator)
        if kind == "clustered":
            values = values[centres] + draw.uniform(0.01, 0.3) * torch.randn(
                count, per_token, *shape, generator=generator
            )
        if kind == "zero":
            values = torch.zeros_like(values)
        if kind == "broken":
            values[broken, 0] = draw.choice([torch.nan, torch.inf, -torch.inf])
        return values[source].flatten(0, 1)

    states = {layer: tokens(width) for layer in range(NUM_LAYERS + 1)}
    profile = encoder.measured
    assert profile.sink_coordinate is not None
    assert profile.sink_layer is not None
    coordinate = min(profile.sink_coordinate, width - 1)
    encoder = replace(encoder, profile=replace(profile, sink_coordinate=coordinate))
    if draw.random() < 0.5:  # sinks, perhaps all tokens
        is_sink = torch.rand(count * patches, generator=generator) < draw.choice([0.1, 1.0])
        states[profile.sink_layer + 1][is_sink, coordinate] = 70.0
    num_query = draw.choice([0, 1, 3, 7])
    weight = torch.randn(width, llm_width, generator=generator)
    rows = next(rows for rows in range(int(count**0.5), 0, -1) if count % rows == 0)
    return Image(
        signals=Signals(
            states=states,
            features=states[NUM_LAYERS],
            class_attention={n: tokens().abs() for n in range(NUM_LAYERS)},
            received_attention={n: tokens().abs() for n in range(NUM_LAYERS)},
            keys={n: tokens(7) for n in range(NUM_LAYERS)},
            mlp_updates={n: tokens().abs() for n in range(NUM_LAYERS)},
        ),
        visual=tokens(llm_width, per_token=1),
        encoder=encoder,
        query=torch.randn(num_query, llm_width, generator=generator) if num_query else None,
        grids=((rows, count // rows),),
        seed=seed,
        project=(lambda features: (features @ weight).tanh()) if with_class_token else None,
    )


def array(tensor: Tensor | None) -> Array:
    """A tensor for a reference; no query is an empty one."""
    return np.zeros((0, 1)) if tensor is None else tensor.double().numpy()


def _prunesid(image: Image, budget: int) -> Expected:
    if not image.encoder.has_class_token:
        return prunesid_reference(array(image.visual), None, budget)
    signals = image.signals
    return prunesid_reference(array(signals.features), array(signals.class_attention[LAST]), budget)


def _visionzip(image: Image, budget: int) -> Expected:
    signals, encoder = image.signals, image.encoder
    by_class = encoder.has_class_token
    attention = signals.class_attention if by_class else signals.received_attention
    return visionzip_reference(
        array(attention[LAST]),
        array(signals.keys[LAST]),
        array(signals.features if by_class else image.visual),
        budget,
        encoder.patches_per_token,
    )


def _representation_shift(image: Image, budget: int) -> Expected:
    profile = image.encoder.measured
    assert profile.sink_layer is not None
    return representation_shift_reference(
        array(image.signals.mlp_updates[3]),  # the middle of the window from 2 to 4
        array(image.signals.states[profile.sink_layer + 1]),
        profile,
        budget,
        image.encoder.patches_per_token,
    )


REFERENCES: dict[str, Callable[[Image, int], Expected]] = {
    "cls_attention": lambda image, budget: cls_attention_reference(
        array(image.signals.class_attention[LAST]), budget, image.encoder.patches_per_token
    ),
    "visionzip": _visionzip,
    "divprune": lambda image, budget: divprune_reference(array(image.visual), budget),
    "prunesid": _prunesid,
    "hiprune": lambda image, budget: hiprune_reference(
        array(image.signals.received_attention[MIDDLE]),
        array(image.signals.received_attention[LAST]),
        image.grids[0][1],
        budget,
        image.encoder.patches_per_token,
    ),
    "cdpruner": lambda image, budget: cdpruner_reference(
        array(image.visual), array(image.query), budget
    ),
    "evocut": lambda image, budget: evocut_reference(
        {n: array(image.signals.states[n]) for n in range(NUM_LAYERS)},
        image.encoder.measured,
        budget,
        image.encoder.patches_per_token,
    ),
    "representation_shift": _representation_shift,
    "dart0": lambda image, budget: dart0_reference(array(image.visual), array(image.query), budget),
    "cen_divprune": lambda image, budget: cen_divprune_reference(array(image.visual), budget),
    "cen_cdpruner": lambda image, budget: cen_cdpruner_reference(
        array(image.visual), array(image.query), budget
    ),
    "pool": lambda image, budget: pool_reference(array(image.visual), image.grids, budget),
}

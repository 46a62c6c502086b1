"""Seeded random images for the tests of the core."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from msdg_vllm.core.profiles import EncoderProfile
from tests.reference import Selection, select_reference


@dataclass(frozen=True)
class Case:
    """One image with a question and a budget."""

    states: dict[int, Tensor]
    visual: Tensor
    query: Tensor
    budget: int
    profile: EncoderProfile
    patches_per_token: int = 1
    valid: Tensor | None = None

    def solve(self) -> Selection:
        """What the reference makes of it."""
        return select_reference(
            {layer: state.numpy() for layer, state in self.states.items()},
            self.visual.numpy(),
            self.query.numpy(),
            self.budget,
            self.profile,
            self.patches_per_token,
            None if self.valid is None else self.valid.numpy(),
        )


def make_profile(num_groups: int = 4, seed: int = 0, sink_coordinate: int = 1) -> EncoderProfile:
    """A profile for states of layers 0, 2, 3, 4 and 5."""
    return EncoderProfile(
        direction_layers=(0, 5),
        saliency_window=(2, 4),
        sink_layer=2,
        sink_coordinate=sink_coordinate,
        num_groups=num_groups,
        seed=seed,
    )


def random_case(seed: int) -> Case:
    """Draw an image: sizes, clusters, sinks, duplicates, budgets and group counts all vary."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    num_tokens = draw.choice(
        [draw.randint(1, 12), draw.randint(2, 48), draw.randint(2, 48), draw.randint(20, 160)]
    )
    if seed % 25 == 0:
        num_tokens = draw.randint(160, 576)
    if seed % 500 == 0:
        num_tokens = draw.choice([2880, draw.randint(577, 2880)])
    patches_per_token = 4 if num_tokens < 600 and draw.random() < 0.2 else 1
    num_patches = num_tokens * patches_per_token
    width, llm_width = draw.randint(3, 48), draw.randint(3, 48)
    num_groups = draw.choice([1, draw.randint(1, 40), draw.randint(1, 8), 20])

    profile = make_profile(num_groups, draw.randint(0, 5000), draw.randrange(width))
    # Saliency far beyond 1 makes the softmax all or nothing; mostly stay below.
    scale = 10 ** draw.uniform(-2, 2 if draw.random() < 0.05 else 0)
    states = {layer: scale * normal(num_patches, width) for layer in profile.layers}
    if draw.random() < 0.6:  # tokens gather around a few directions
        centers = normal(draw.randint(1, 30), width)
        which = torch.randint(len(centers), (num_patches,), generator=generator)
        states[5] = scale * (centers[which] + draw.uniform(0.01, 0.7) * normal(num_patches, width))
    visual, query = normal(num_tokens, llm_width), normal(draw.choice([0, 1, 3, 8]), llm_width)
    if draw.random() < 0.25:  # some tokens are copies of others
        source = torch.randint(num_tokens, (num_tokens,), generator=generator)
        is_copy = torch.rand(num_tokens, generator=generator) < 0.4
        source = torch.where(is_copy, source, torch.arange(num_tokens))
        visual = visual[source]
        patches = (source[:, None] * patches_per_token + torch.arange(patches_per_token)).flatten()
        states = {layer: state[patches] for layer, state in states.items()}
    if draw.random() < 0.15:  # some tokens do not turn at all: their direction is zero
        still = torch.rand(num_tokens, generator=generator) < draw.choice([0.1, 0.5, 1.0])
        still = still.repeat_interleave(patches_per_token)
        states[5][still] = states[0][still]
    sink_state = states[3]
    sink_state[:, profile.sink_coordinate].clamp_(-49, 49)
    if draw.random() < 0.5:
        is_sink = torch.rand(num_patches, generator=generator) < draw.choice([0.02, 0.1, 0.5])
        sink_state[is_sink, profile.sink_coordinate] = 60 + 20 * normal(int(is_sink.sum())).abs()
    valid = None
    if draw.random() < 0.15:
        valid = torch.rand(num_tokens, generator=generator) < 0.8
        valid[draw.randrange(num_tokens)] = True
    most = num_tokens if valid is None else int(valid.sum())
    budget = max(1, min(most, draw.choice([most, round(0.111 * most), draw.randint(1, most)])))
    return Case(states, visual, query, budget, profile, patches_per_token, valid)

"""Known weaknesses of the originals, shown as facts, and that ours do not have them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.selection.peak_memory import PeakMemory
from msdg_vllm.methods import Image, method_named
from tests.method_references.originals import (
    cdpruner_original,
    divprune_original,
    prunesid_original,
)
from tests.unit.methods.cases import LAST, make_image

NUM_TOKENS, WIDTH, BUDGET = 100, 256, 20


def flat() -> Tensor:
    """The tokens of a picture of one colour."""
    return torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(0)).expand(NUM_TOKENS, -1)


def two_colours() -> Tensor:
    """The tokens of a picture whose left half has another colour than the right one."""
    colours = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
    return colours[(torch.arange(NUM_TOKENS) % 10 > 4).long()]


def picture_of(visual: Tensor) -> Image:
    """An image with these projected tokens and a question."""
    image = make_image(3, "random", num_tokens=NUM_TOKENS)
    query = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(2))
    return replace(image, visual=visual, query=query)


@pytest.mark.parametrize("visual", [flat(), two_colours()], ids=["flat", "two-colours"])
def test_the_original_divprune_repeats_tokens_and_ours_does_not(visual: Tensor) -> None:
    assert len(set(divprune_original(visual, BUDGET))) < BUDGET
    kept = method_named("divprune").select(picture_of(visual), BUDGET).indices
    assert len(set(kept.tolist())) == BUDGET


@pytest.mark.parametrize("visual", [flat(), two_colours()], ids=["flat", "two-colours"])
def test_the_original_cdpruner_ends_in_nan_and_repeats_and_ours_does_not(visual: Tensor) -> None:
    relevance = torch.randn(NUM_TOKENS, generator=torch.Generator().manual_seed(3))
    chosen, gains = cdpruner_original(visual, relevance, BUDGET)
    assert gains.isnan().any()
    assert len(set(chosen)) < BUDGET
    choice = method_named("cdpruner").select(picture_of(visual), BUDGET)
    assert len(set(choice.indices.tolist())) == BUDGET
    assert choice.scores is not None
    assert choice.scores.isfinite().all()


def test_the_original_prunesid_keeps_other_tokens_each_time_and_ours_does_not() -> None:
    image = make_image(0, "random", num_tokens=80)
    features = torch.randn(80, 64, generator=torch.Generator().manual_seed(4))
    image = replace(image, signals=replace(image.signals, features=features))
    attention = image.signals.class_attention[LAST]
    torch.manual_seed(0)
    drawn = {
        tuple(prunesid_original(features.double().numpy(), attention.double().numpy(), 24))
        for _ in range(4)
    }
    assert len(drawn) > 1
    ours = {tuple(method_named("prunesid").select(image, 24).indices.tolist()) for _ in range(4)}
    assert len(ours) == 1


def test_the_original_visionzip_holds_a_map_of_attention_and_ours_needs_less_than_a_tenth() -> None:
    num_tokens, num_heads = 576, 16
    image = make_image(0, "random", num_tokens=num_tokens)
    features = torch.randn(num_tokens, 1024)
    keys = {LAST: torch.randn(num_tokens, 64)}
    image = replace(
        image,
        signals=replace(image.signals, features=features, keys=keys),
        visual=torch.randn(num_tokens, 64),
        project=lambda merged: merged[:, :64],
    )
    with PeakMemory(features, keys, image.visual) as memory:
        method_named("visionzip").select(image, 64)
    assert memory.peak < num_heads * (num_tokens + 1) ** 2 * 4 / 10

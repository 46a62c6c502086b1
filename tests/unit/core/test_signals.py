"""Sinks, saliency, directions and relevance, each as the paper defines it."""

import math
from operator import itemgetter

import pytest
import torch
from torch import Tensor

from msdg_vllm.core import analyze_image, score_tokens
from msdg_vllm.core.signals import query_relevance
from msdg_vllm.core.stream import TokenSignals, token_signals
from tests.unit.core.cases import make_profile, random_case

PROFILE = make_profile(num_groups=2, sink_coordinate=1)


def make_states(num_tokens: int, width: int = 4, seed: int = 0) -> dict[int, Tensor]:
    """Random states for `PROFILE` without a sink."""
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(num_tokens, width, generator=generator) for n in PROFILE.layers}


def of_tokens(states: dict[int, Tensor], patches_per_token: int) -> TokenSignals:
    """The signals of the tokens of one image."""
    batch = {n: state.unsqueeze(0) for n, state in states.items()}
    return token_signals(batch, PROFILE, patches_per_token).map(itemgetter(0))


def test_a_sink_exceeds_the_threshold_at_the_coordinate_of_the_state_behind_the_peak() -> None:
    states = make_states(6)
    states[3][:, 1] = torch.tensor([0.0, 50.0, 50.001, -50.0, -50.001, 1e6])
    states[3][:, 0] = 1e6  # another coordinate
    states[2][:, 1] = 1e6  # the state before the peak layer
    signals = analyze_image(states, PROFILE)
    assert signals.sink_mask.tolist() == [False, False, True, False, True, True]
    assert (signals.groups >= 0).tolist() == [True, True, False, True, False, False]
    torch.testing.assert_close(signals.sink_activation, states[3][:, 1].abs())


def test_saliency_is_the_displacement_between_the_ends_of_the_window() -> None:
    states = make_states(2)
    states[2] = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    states[4] = torch.tensor([[4.0, 5.0, 1.0, 1.0], [0.0, 0.0, 0.0, 2.0]])
    assert analyze_image(states, PROFILE).saliency.tolist() == [5.0, 2.0]


def test_directions_are_unit_displacements_of_unit_states() -> None:
    states = make_states(1, width=2)
    states[0] = torch.tensor([[5.0, 0.0]])
    states[5] = torch.tensor([[0.0, 0.1]])
    directions = of_tokens(states, 1).directions
    assert directions is not None
    half = math.sqrt(0.5)
    torch.testing.assert_close(directions, torch.tensor([[-half, half]]))


def test_a_direction_does_not_depend_on_the_norms_of_the_states() -> None:
    states = make_states(9)
    scaled = {n: state * torch.arange(1.0, 10.0).unsqueeze(-1) for n, state in states.items()}
    plain = of_tokens(states, 1).directions
    torch.testing.assert_close(of_tokens(scaled, 1).directions, plain)


def test_relevance_is_the_highest_cosine_to_a_query_token() -> None:
    visual = torch.tensor([[2.0, 0.0], [0.0, -3.0], [1.0, 1.0], [0.0, 0.0]])
    query = torch.tensor([[5.0, 0.0], [0.0, 0.5]])
    expected = torch.tensor([1.0, 0.0, math.sqrt(0.5), 0.0])
    torch.testing.assert_close(query_relevance(visual, query), expected)


def test_a_negative_relevance_stays_negative() -> None:
    visual, query = torch.tensor([[1.0, 0.0], [-1.0, 0.5]]), torch.tensor([[-2.0, 0.0]])
    relevance = query_relevance(visual, query)
    torch.testing.assert_close(relevance, torch.tensor([-1.0, 1 / math.sqrt(1.25)]))


def test_the_score_is_relevance_times_saliency() -> None:
    case = random_case(17)
    signals = analyze_image(case.states, case.profile, case.patches_per_token, valid=case.valid)
    scores = score_tokens(signals, case.visual, case.query)
    torch.testing.assert_close(scores.score, scores.relevance * signals.saliency)


@pytest.mark.parametrize("seed", range(40))
def test_saliency_and_relevance_are_those_of_the_reference(seed: int) -> None:
    case = random_case(seed)
    expected = case.solve()
    signals = analyze_image(case.states, case.profile, case.patches_per_token, valid=case.valid)
    scores = score_tokens(signals, case.visual, case.query)
    candidates = torch.tensor([not math.isnan(value) for value in expected.saliency])
    for ours, theirs in (
        (signals.saliency, expected.saliency),
        (scores.relevance, expected.relevance),
    ):
        torch.testing.assert_close(
            ours[candidates], torch.tensor(theirs)[candidates], rtol=1e-5, atol=1e-6
        )


def test_a_query_may_be_padded_by_repeating_a_token() -> None:
    case = random_case(3)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, case.visual.shape[-1], generator=generator)
    padded = torch.cat([query, query[-1:].expand(4, -1)])
    torch.testing.assert_close(
        query_relevance(case.visual, padded), query_relevance(case.visual, query)
    )


def test_patches_are_averaged_and_one_sink_among_them_decides() -> None:
    states = make_states(8, width=3)
    states[3][:, 1] = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 70.0, 60.0, 0.0])
    patches = of_tokens(states, 1)
    merged = of_tokens(states, 4)
    assert patches.directions is not None
    torch.testing.assert_close(merged.saliency, patches.saliency.view(2, 4).mean(dim=1))
    mean = patches.directions.view(2, 4, 3).mean(dim=1)
    unit_mean = mean / mean.norm(dim=1, keepdim=True)
    torch.testing.assert_close(merged.directions, unit_mean)
    signals = analyze_image(states, PROFILE, patches_per_token=4)
    assert signals.sink_mask.tolist() == [False, True]
    assert signals.sink_activation.tolist() == [0.0, 70.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_arithmetic_is_float32_whatever_comes_in(dtype: torch.dtype) -> None:
    case = random_case(23)
    states = {n: state.to(dtype) for n, state in case.states.items()}
    visual, query = case.visual.to(dtype), torch.ones(2, case.visual.shape[-1], dtype=dtype)
    signals = analyze_image(states, case.profile, case.patches_per_token)
    as_float = {n: state.float() for n, state in states.items()}
    expected = analyze_image(as_float, case.profile, case.patches_per_token)
    scores = score_tokens(signals, visual, query)
    assert torch.equal(signals.saliency, expected.saliency)
    assert torch.equal(signals.groups, expected.groups)
    assert torch.equal(scores.score, score_tokens(expected, visual.float(), query.float()).score)
    assert signals.saliency.dtype == scores.score.dtype == torch.float32


def test_autocast_does_not_reach_the_arithmetic() -> None:
    case = random_case(25)
    signals = analyze_image(case.states, case.profile, case.patches_per_token)
    query = torch.ones(2, case.visual.shape[-1])
    scores = score_tokens(signals, case.visual, query)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = analyze_image(case.states, case.profile, case.patches_per_token)
        scores_again = score_tokens(again, case.visual, query)
    assert torch.equal(again.groups, signals.groups)
    assert torch.equal(scores_again.score, scores.score)

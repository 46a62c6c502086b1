"""What is kept: ranks inside groups, and what the paper leaves unsaid."""

import pytest
import torch
from torch import Tensor

from msdg_vllm.core import ImageSignals, analyze_image, score_tokens, select_tokens, take_tokens
from msdg_vllm.core.profiles import EncoderProfile
from tests.unit.core.cases import make_profile, random_case


def make_signals(
    groups: list[int], saliency: list[float], activation: list[float] | None = None
) -> ImageSignals:
    """Signals written by hand; group -1 is a sink."""
    labels = torch.tensor(groups)
    num_groups = max(groups) + 1
    return ImageSignals(
        saliency=torch.tensor(saliency),
        groups=labels,
        num_groups=torch.tensor(num_groups),
        sink_mask=labels < 0,
        sink_activation=torch.tensor(activation or [0.0] * len(groups)),
        max_groups=max(num_groups, 1),
    )


def keep(signals: ImageSignals, budget: int) -> list[int]:
    """Indices kept without a query."""
    indices: list[int] = select_tokens(
        signals, torch.ones(signals.num_tokens, 2), None, budget
    ).tolist()
    return indices


def image(num_tokens: int = 12, seed: int = 0) -> tuple[dict[int, Tensor], EncoderProfile]:
    """Random states without a sink."""
    generator = torch.Generator().manual_seed(seed)
    profile = make_profile(num_groups=3)
    return {n: torch.randn(num_tokens, 6, generator=generator) for n in profile.layers}, profile


def test_the_highest_scores_of_each_group_are_kept_in_original_order() -> None:
    signals = make_signals([0, 1, 0, 1, 0, 1], [0.3, 0.1, 0.1, 0.2, 0.2, 0.3])
    assert keep(signals, 4) == [0, 3, 4, 5]


def test_equal_scores_are_kept_in_original_order() -> None:
    signals = make_signals([0, 0, 0, 1, 1, 1], [0.5, 0.5, 0.5, 0.5, 0.5, 0.5])
    assert keep(signals, 4) == [0, 1, 3, 4]
    assert keep(signals, 3) == [0, 1, 3]


def test_equal_tokens_are_kept_in_original_order_wherever_they_stand() -> None:
    for num_tokens in (3, 7, 18, 61):
        visual = torch.randn(1, 37, generator=torch.Generator().manual_seed(1))
        query = torch.randn(5, 37, generator=torch.Generator().manual_seed(2))
        signals = make_signals([0] * num_tokens, [1.7] * num_tokens)
        kept = select_tokens(signals, visual.expand(num_tokens, -1).contiguous(), query, 2)
        assert kept.tolist() == [0, 1]


def test_a_negative_score_ranks_below_zero() -> None:
    signals = make_signals([0, 0, 0], [1.0, 0.0, 1.0])
    visual, query = torch.tensor([[-1.0], [1.0], [1.0]]), torch.tensor([[1.0]])
    assert score_tokens(signals, visual, query).score.tolist() == [-1.0, 0.0, 1.0]
    assert select_tokens(signals, visual, query, 2).tolist() == [1, 2]


def test_without_a_query_the_relevance_is_one() -> None:
    states, profile = image()
    signals = analyze_image(states, profile)
    visual = torch.randn(12, 5)
    for no_query in (None, torch.zeros(0, 5)):
        scores = score_tokens(signals, visual, no_query)
        assert scores.relevance.tolist() == [1.0] * 12
        assert torch.equal(scores.score, signals.saliency)


def test_beyond_the_candidates_sinks_are_kept_by_ascending_activation() -> None:
    groups = [0, -1, 0, -1, -1, -1]
    signals = make_signals(groups, [1.0] * 6, [0.0, 90.0, 0.0, 60.0, 90.0, 70.0])
    assert keep(signals, 2) == [0, 2]
    assert keep(signals, 3) == [0, 2, 3]
    assert keep(signals, 4) == [0, 2, 3, 5]
    assert keep(signals, 5) == [0, 1, 2, 3, 5]  # 1 and 4 tie
    assert keep(signals, 6) == [0, 1, 2, 3, 4, 5]


def test_nothing_but_sinks_is_no_error() -> None:
    states, profile = image()
    states[3][:, 1] = torch.arange(12).flip(0) + 60.0
    signals = analyze_image(states, profile)
    assert signals.num_groups.item() == 0
    assert keep(signals, 3) == [9, 10, 11]


def test_there_are_at_most_as_many_groups_as_candidates() -> None:
    states, _ = image()
    states[3][:10, 1] = 99.0
    signals = analyze_image(states, make_profile(num_groups=5))
    assert signals.num_groups.item() == 2
    assert sorted(signals.groups.tolist()[10:]) == [0, 1]


def test_all_directions_zero_make_one_group() -> None:
    states, profile = image()
    states[5] = states[0].clone()
    signals = analyze_image(states, profile)
    assert signals.num_groups.item() == 1
    assert signals.groups.tolist() == [0] * 12
    top = signals.saliency.argsort(descending=True)[:4].sort().values
    assert keep(signals, 4) == top.tolist()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
@pytest.mark.parametrize("layer", [0, 2, 3, 4, 5])
def test_a_state_that_is_not_finite_makes_a_sink(layer: int, value: float) -> None:
    states, profile = image()
    states[layer][4, 2] = value
    states[3][7, 1] = 99.0
    signals = analyze_image(states, profile)
    assert signals.sink_mask.nonzero().flatten().tolist() == [4, 7]
    assert signals.saliency.isfinite().all()
    # An ordinary sink is taken back first.
    assert keep(signals, 11) == [i for i in range(12) if i != 4]
    clean, _ = image()
    for state in clean.values():
        state[4] = 0.0
    clean[3][[4, 7], 1] = 99.0
    assert torch.equal(analyze_image(clean, profile).groups, signals.groups)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
def test_embeddings_that_are_not_finite_never_reach_the_scores(value: float) -> None:
    states, profile = image()
    signals = analyze_image(states, profile)
    generator = torch.Generator().manual_seed(0)
    visual = torch.randn(12, 5, generator=generator)
    query = torch.randn(3, 5, generator=generator)
    expected = score_tokens(signals, visual, query[:2])
    visual[4, 1] = value
    query[2, 0] = value
    scores = score_tokens(signals, visual, query)
    others = [i for i in range(12) if i != 4]
    torch.testing.assert_close(scores.relevance[others], expected.relevance[others])
    assert scores.relevance[4] == -1
    query[:] = value
    assert score_tokens(signals, visual, query).relevance.tolist() == [1.0] * 12


def test_padding_is_neither_candidate_nor_sink_and_never_kept() -> None:
    states, profile = image()
    valid = torch.ones(12, dtype=torch.bool)
    valid[[0, 5, 11]] = False
    states[3][[5, 6], 1] = 99.0
    for state in states.values():
        state[11] = float("nan")
    signals = analyze_image(states, profile, valid=valid)
    assert signals.sink_mask.nonzero().flatten().tolist() == [6]
    assert signals.groups[~valid].tolist() == [-1, -1, -1]
    assert keep(signals, 9) == valid.nonzero().flatten().tolist()
    # Only a budget beyond the valid tokens reaches for padding, in original order.
    assert keep(signals, 10) == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]


def test_padding_changes_nothing_for_the_others() -> None:
    states, profile = image()
    longer = {n: torch.cat([state, 7 * torch.ones(5, 6)]) for n, state in states.items()}
    valid = torch.arange(17) < 12
    signals, padded = analyze_image(states, profile), analyze_image(longer, profile, valid=valid)
    assert torch.equal(padded.groups[:12], signals.groups)
    assert keep(padded, 5) == keep(signals, 5)


def test_one_analysis_serves_many_questions_and_budgets() -> None:
    case = random_case(75)
    signals = analyze_image(case.states, case.profile, case.patches_per_token, valid=case.valid)
    before = signals.map(torch.clone)
    for seed in range(5):
        query = torch.randn(4, case.visual.shape[-1], generator=torch.Generator().manual_seed(seed))
        scores = score_tokens(signals, case.visual, query)
        for budget in (1, 7, signals.num_tokens):
            kept = select_tokens(signals, case.visual, query, budget)
            assert torch.equal(kept, take_tokens(signals, scores, budget))
            fresh = analyze_image(
                case.states, case.profile, case.patches_per_token, valid=case.valid
            )
            assert torch.equal(kept, select_tokens(fresh, case.visual, query, budget))
    assert torch.equal(before.groups, signals.groups)
    assert torch.equal(before.saliency, signals.saliency)


def test_signals_are_small_and_hold_no_state() -> None:
    profile = make_profile(num_groups=20)
    states = {n: torch.randn(2, 300, 512) for n in profile.layers}
    signals = analyze_image(states, profile)
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    signals.map(note)
    assert sum(storages.values()) < 2 * 300 * 64


def test_inputs_are_left_as_they_were() -> None:
    states, profile = image()
    visual, query = torch.randn(12, 16), torch.randn(4, 16)
    before = [tensor.clone() for tensor in (*states.values(), visual, query)]
    select_tokens(analyze_image(states, profile), visual, query, 3)
    for old, new in zip(before, (*states.values(), visual, query), strict=True):
        assert torch.equal(old, new)


def test_states_with_gradients_give_signals_without() -> None:
    states, profile = image()
    tracked = {n: state.requires_grad_() for n, state in states.items()}
    assert not analyze_image(tracked, profile).saliency.requires_grad


@pytest.mark.parametrize("budget", [0, -1, 13, True, 2.0, None])
def test_a_budget_outside_one_to_n_is_refused(budget: int) -> None:
    states, profile = image()
    with pytest.raises(ValueError, match="budget must be an integer from 1 to 12, got"):
        keep(analyze_image(states, profile), budget)


def test_states_that_do_not_fit_are_refused_by_name() -> None:
    states, profile = image()
    with pytest.raises(ValueError, match=r"states of layers \[3, 5\] are missing; needed are"):
        analyze_image({n: states[n] for n in (0, 2, 4)}, profile)
    with pytest.raises(ValueError, match="states must have one shape"):
        analyze_image({**states, 5: states[5][:-1]}, profile)
    with pytest.raises(ValueError, match="states must have one shape"):
        analyze_image({n: state[:0] for n, state in states.items()}, profile)
    with pytest.raises(ValueError, match="patches_per_token must divide the number of patches, 12"):
        analyze_image(states, profile, patches_per_token=5)
    with pytest.raises(ValueError, match="sink_coordinate must be below the width of the states"):
        analyze_image(states, make_profile(sink_coordinate=6))
    with pytest.raises(ValueError, match=r"valid must be \(12,\), got \(11,\)"):
        analyze_image(states, profile, valid=torch.ones(11, dtype=torch.bool))


def test_embeddings_that_do_not_fit_are_refused_by_name() -> None:
    states, profile = image()
    signals = analyze_image(states, profile)
    visual = torch.randn(12, 5)
    with pytest.raises(ValueError, match="visual must have the shape"):
        select_tokens(signals, visual[:-1], None, 3)
    with pytest.raises(ValueError, match="query must have the shape"):
        select_tokens(signals, visual, torch.randn(2, 6), 3)
    with pytest.raises(ValueError, match="query must have the shape"):
        select_tokens(signals, visual, torch.randn(4, 2, 5), 3)

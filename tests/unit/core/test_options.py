"""The paper's ablations. Most are held to the reference by an image on which the paper's own
method does what the variant would do."""

import dataclasses
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from msdg_vllm.core import ImageSignals, SelectionOptions, analyze_image, score_tokens, take_tokens
from msdg_vllm.core.errors import OptionError
from msdg_vllm.core.options import PAPER
from tests.reference import Selection, share_budget
from tests.unit.core.cases import Case, random_case

CASES = [case for case in map(random_case, range(300, 400)) if len(case.visual) > 4][:40]


def run(case: Case, options: SelectionOptions, saliency: Tensor | None = None) -> list[int]:
    """Indices kept by a variant."""
    signals = analyze_image(
        case.states,
        case.profile,
        case.patches_per_token,
        valid=case.valid,
        saliency=saliency,
        options=options,
    )
    scores = score_tokens(signals, case.visual, case.query)
    indices: list[int] = take_tokens(signals, scores, case.budget, options).tolist()
    return indices


def with_saliency(case: Case, saliency: Tensor) -> Case:
    """The case with states between which every patch moves by the given distance."""
    moved = torch.zeros_like(case.states[2])
    moved[:, 0] = saliency
    return replace(case, states={**case.states, 2: torch.zeros_like(moved), 4: moved})


def agree(case: Case, keep: list[int]) -> bool:
    """The reference keeps the same tokens, or its decision was too close to call."""
    expected = case.solve()
    return keep == expected.keep or expected.margin <= 1


def test_the_default_is_the_paper() -> None:
    assert SelectionOptions() == PAPER
    assert all(agree(case, run(case, SelectionOptions())) for case in CASES)


def test_grouping_by_output_features() -> None:
    # With an early state of zero a direction is the unit late state.
    for case in CASES:
        profile = replace(case.profile, output_layer=7)
        variant = replace(case, profile=profile, states={**case.states, 7: case.states[5]})
        assert 0 in PAPER.layers(profile)
        same = replace(case, states={**case.states, 0: torch.zeros_like(case.states[0])})
        assert agree(same, run(variant, SelectionOptions(grouping="output")))


def test_output_features_are_the_late_direction_state_unless_named() -> None:
    case = CASES[0]
    options = SelectionOptions(grouping="output")
    named = replace(case, profile=replace(case.profile, output_layer=5))
    assert run(case, options) == run(named, options)


def test_accumulated_saliency_adds_up_every_layer_of_the_window() -> None:
    for case in CASES:
        h = {n: case.states[n].double() for n in (2, 3, 4)}
        total = (h[3] - h[2]).norm(dim=-1) + (h[4] - h[3]).norm(dim=-1)
        assert agree(
            with_saliency(case, total.float()), run(case, SelectionOptions(saliency="accumulated"))
        )


def test_given_saliency_replaces_the_displacement() -> None:
    for seed, case in enumerate(CASES):
        generator = torch.Generator().manual_seed(seed)
        given = torch.rand(len(case.states[2]), generator=generator)
        keep = run(case, SelectionOptions(saliency="given"), saliency=given)
        assert agree(with_saliency(case, given), keep)


def test_saliency_is_given_if_and_only_if_the_option_says_so() -> None:
    case = CASES[0]
    with pytest.raises(ValueError, match="saliency must be passed if, and only if"):
        run(case, SelectionOptions(saliency="given"))
    with pytest.raises(ValueError, match="saliency must be passed if, and only if"):
        run(case, SelectionOptions(), saliency=torch.ones(len(case.states[2])))
    with pytest.raises(ValueError, match="saliency must have one value per patch"):
        run(case, SelectionOptions(saliency="given"), saliency=torch.ones(3))


def test_without_the_sink_filter_sinks_are_candidates() -> None:
    for case in CASES:
        open_profile = replace(case.profile, sink_threshold=1e30)
        assert agree(
            replace(case, profile=open_profile), run(case, SelectionOptions(sink_filter=False))
        )


def test_a_variant_can_do_without_any_state() -> None:
    options = SelectionOptions(grouping="none", saliency="given", sink_filter=False)
    given = torch.tensor([0.1, 0.9, 0.5, 0.7])
    signals = analyze_image({}, CASES[0].profile, saliency=given, options=options)
    scores = score_tokens(signals, torch.ones(4, 2), None)
    assert take_tokens(signals, scores, 2, options).tolist() == [1, 3]


def analyzed(case: Case) -> tuple[ImageSignals, dict[str, list[float]]]:
    """Signals of a case and its three signals by name."""
    signals = analyze_image(case.states, case.profile, case.patches_per_token, valid=case.valid)
    scores = score_tokens(signals, case.visual, case.query)
    return signals, {
        "score": scores.score.tolist(),
        "relevance": scores.relevance.tolist(),
        "saliency": signals.saliency.tolist(),
    }


def literal_take(
    case: Case, shares_from: str, rank_by: str, noise: float = 1e-5
) -> tuple[list[int], bool]:
    """Lines 14-21 with other signals, on the groups of the core; False if too close to call."""
    signals, values = analyzed(case)
    groups = signals.groups.tolist()
    members = [
        [i for i, g in enumerate(groups) if g == c] for c in range(int(signals.num_groups.item()))
    ]
    sizes = [len(group) for group in members]
    spent = min(case.budget, sum(sizes))
    if shares_from == "size":
        shares = [size / max(sum(sizes), 1) for size in sizes]
    else:
        means = [
            sum(values[shares_from][i] for i in group) / len(group) if group else 0.0
            for group in members
        ]
        weights = [math.exp(mean - max(means)) for mean in means]
        shares = [weight / sum(weights) for weight in weights]
    out = Selection()
    budgets = share_budget(out, shares, sizes, spent, noise)
    kept: list[int] = []
    for group, b in zip(members, budgets, strict=True):
        kept += sorted(group, key=lambda i: (-values[rank_by][i], i))[:b]
    return sorted(kept), out.margin > 1


@pytest.mark.parametrize("allocate_by", ["score", "relevance", "saliency"])
@pytest.mark.parametrize("rank_by", ["score", "relevance", "saliency"])
def test_signals_can_be_assigned_to_allocation_and_ranking(allocate_by: str, rank_by: str) -> None:
    num_clear = 0
    for case in CASES:
        options = SelectionOptions(allocate_by=allocate_by, rank_by=rank_by)  # type: ignore[arg-type]
        expected, is_clear = literal_take(case, allocate_by, rank_by)
        if is_clear and len(expected) == case.budget:
            num_clear += 1
            assert run(case, options) == expected
    assert num_clear > len(CASES) / 2


def test_budgets_can_follow_the_size_of_groups() -> None:
    num_clear = 0
    for case in CASES:
        expected, is_clear = literal_take(case, "size", "score", noise=1e-12)
        if is_clear and len(expected) == case.budget:
            num_clear += 1
            assert run(case, SelectionOptions(budgets="size")) == expected
    assert num_clear > len(CASES) / 2


@pytest.mark.parametrize("rank_by", ["score", "relevance", "saliency"])
def test_without_groups_the_ranking_is_global(rank_by: str) -> None:
    for case in CASES:
        signals, values = analyzed(case)
        options = SelectionOptions(grouping="none", rank_by=rank_by)  # type: ignore[arg-type]
        candidates = signals.candidate_mask.nonzero().flatten().tolist()
        best = sorted(candidates, key=lambda i: (-values[rank_by][i], i))[: case.budget]
        if len(best) == case.budget:
            assert run(case, options) == sorted(best)


def random_draws(num_tokens: int, budget: int, num_draws: int) -> Tensor:
    """Tokens kept by the random baseline for the seeds 0, 1, ..: `(num_draws, budget)`."""
    plain = SelectionOptions(grouping="none", saliency="given", sink_filter=False)
    signals = analyze_image({}, CASES[0].profile, saliency=torch.ones(num_tokens), options=plain)
    scores = score_tokens(signals, torch.ones(num_tokens, 2), None)
    options = [replace(plain, rank_by="random", random_seed=seed) for seed in range(num_draws)]
    return torch.stack([take_tokens(signals, scores, budget, option) for option in options])


def test_random_ranking_repeats_for_a_seed_and_differs_between_seeds() -> None:
    draws = random_draws(50, 10, 20)
    assert torch.equal(draws, random_draws(50, 10, 20))
    assert len({tuple(draw) for draw in draws.tolist()}) == 20


def test_random_ranking_treats_all_positions_alike() -> None:
    num_tokens, budget, num_draws = 100, 25, 800
    frequency = random_draws(num_tokens, budget, num_draws).flatten().bincount() / num_draws
    # Six standard deviations of a fair draw.
    assert (frequency - 0.25).abs().max() < 6 * math.sqrt(0.25 * 0.75 / num_draws)


@pytest.mark.parametrize(
    "field", [f.name for f in dataclasses.fields(SelectionOptions) if f.name != "random_seed"]
)
def test_an_option_that_does_not_exist_is_refused_with_the_choices(field: str) -> None:
    with pytest.raises(OptionError, match=f"{field} must be one of .*, got 'nonsense'"):
        SelectionOptions(**{field: "nonsense"})  # type: ignore[arg-type]


def test_without_sinks_nothing_is_filtered() -> None:
    for case in CASES:
        bare = replace(case.profile, sink_layer=None, sink_coordinate=None)
        expected = run(case, SelectionOptions(sink_filter=False))
        assert run(replace(case, profile=bare), PAPER) == expected


def test_without_a_window_all_tokens_are_equally_salient() -> None:
    for case in CASES:
        off = replace(case, profile=replace(case.profile, saliency_window=None))
        given = torch.ones(len(case.states[2]))
        expected = run(case, SelectionOptions(saliency="given"), saliency=given)
        assert run(off, PAPER) == expected
        assert run(off, SelectionOptions(saliency="accumulated")) == expected


def test_the_scale_multiplies_saliency() -> None:
    for case in CASES:
        scaled = replace(case, profile=replace(case.profile, saliency_scale=0.25))
        plain, small = (
            analyze_image(c.states, c.profile, c.patches_per_token, valid=c.valid)
            for c in (case, scaled)
        )
        assert small.saliency.equal(plain.saliency * 0.25)
        assert small.groups.equal(plain.groups)


def test_the_profile_may_group_by_output_features() -> None:
    for case in CASES:
        by_output = replace(case, profile=replace(case.profile, grouping="output"))
        expected = run(case, SelectionOptions(grouping="output"))
        assert run(by_output, PAPER) == expected
        # An option that names a representation overrules the profile.
        assert run(by_output, SelectionOptions(grouping="direction")) == run(case, PAPER)


def test_a_profile_with_nothing_but_groups_needs_one_state_without_them() -> None:
    case = CASES[0]
    bare = replace(case.profile, saliency_window=None, sink_layer=None, sink_coordinate=None)
    keep = run(replace(case, profile=bare), SelectionOptions(grouping="none"))
    assert len(keep) == case.budget

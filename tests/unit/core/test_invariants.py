"""What holds for every input, whatever its values."""

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from msdg_vllm.core import analyze_image, num_kept_tokens, score_tokens, select_tokens
from tests.unit.core.cases import Case, make_profile

ANY_FLOAT = st.floats(width=32, allow_nan=True, allow_infinity=True)
ORDINARY_FLOAT = st.floats(-100, 100, width=32)


@st.composite
def images(draw: st.DrawFn, elements: st.SearchStrategy[float]) -> Case:
    """A small image with arbitrary values; sinks and padding as they come."""
    num_tokens, width = draw(st.integers(1, 24)), draw(st.integers(2, 6))
    patches = draw(st.sampled_from([1, 1, 4]))
    profile = make_profile(draw(st.integers(1, 8)), draw(st.integers(0, 99)))

    def array(*shape: int) -> torch.Tensor:
        # Few distinct values: ties, copies and zeros are what should be tried.
        values: Any = draw(hnp.arrays(np.float32, shape, elements=elements))
        return torch.from_numpy(values)

    return Case(
        states={n: array(num_tokens * patches, width) for n in profile.layers},
        visual=array(num_tokens, 3),
        query=array(draw(st.integers(0, 3)), 3),
        budget=draw(st.integers(1, num_tokens)),
        profile=profile,
        patches_per_token=patches,
        valid=draw(st.none() | hnp.arrays(np.bool_, num_tokens).map(torch.from_numpy)),
    )


@settings(max_examples=150, deadline=None)
@given(images(ANY_FLOAT) | images(ORDINARY_FLOAT))
def test_exactly_the_budget_is_kept_and_everything_is_finite(case: Case) -> None:
    signals = analyze_image(case.states, case.profile, case.patches_per_token, valid=case.valid)
    scores = score_tokens(signals, case.visual, case.query)
    keep = select_tokens(signals, case.visual, case.query, case.budget)
    assert keep.dtype == torch.int64
    assert keep.shape == (case.budget,)
    indices = keep.tolist()
    assert indices == sorted(set(indices))
    assert indices[0] >= 0
    assert indices[-1] < len(case.visual)
    assert signals.saliency.isfinite().all()
    assert scores.relevance.isfinite().all()
    assert not scores.score.isnan().any()
    assert not signals.sink_activation.isnan().any()


@settings(max_examples=80, deadline=None)
@given(images(ANY_FLOAT) | images(ORDINARY_FLOAT))
def test_sinks_are_kept_only_when_candidates_run_out(case: Case) -> None:
    signals = analyze_image(case.states, case.profile, case.patches_per_token, valid=case.valid)
    keep = select_tokens(signals, case.visual, case.query, case.budget)
    candidates = signals.candidate_mask
    num_candidates = int(candidates.sum())
    assert int(candidates[keep].sum()) == min(case.budget, num_candidates)
    num_sinks = int(signals.sink_mask.sum())
    num_kept_sinks = int(signals.sink_mask[keep].sum())
    assert num_kept_sinks == min(max(case.budget - num_candidates, 0), num_sinks)
    assert not (signals.sink_mask & candidates).any()


@settings(max_examples=80, deadline=None)
@given(images(ANY_FLOAT) | images(ORDINARY_FLOAT))
def test_every_candidate_has_a_group_and_nothing_else_has_one(case: Case) -> None:
    signals = analyze_image(case.states, case.profile, case.patches_per_token, valid=case.valid)
    num_groups = int(signals.num_groups)
    num_candidates = int(signals.candidate_mask.sum())
    assert int(signals.groups.min()) >= -1
    assert int(signals.groups.max()) < max(num_groups, 0)
    assert num_groups <= min(case.profile.num_groups, num_candidates)
    assert (num_groups == 0) == (num_candidates == 0)
    outside = ~signals.candidate_mask & ~signals.sink_mask
    assert torch.equal(~outside, torch.ones_like(outside) if case.valid is None else case.valid)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(-10, 10))
def test_scaling_all_states_by_a_power_of_two_changes_no_group(seed: int, exponent: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    profile = make_profile(5)
    states = {n: torch.randn(30, 7, generator=generator) for n in profile.layers}
    states[3].clamp_(-0.01, 0.01)
    scaled = {n: state * 2.0**exponent for n, state in states.items()}
    before, after = analyze_image(states, profile), analyze_image(scaled, profile)
    assert torch.equal(before.groups, after.groups)
    torch.testing.assert_close(after.saliency, before.saliency * 2.0**exponent)


@settings(max_examples=50, deadline=None)
@given(images(ORDINARY_FLOAT), st.floats(0.01, 1))
def test_the_count_made_beforehand_is_the_count_returned(case: Case, retention: float) -> None:
    budget = num_kept_tokens(len(case.visual), retention)
    signals = analyze_image(case.states, case.profile, case.patches_per_token, valid=case.valid)
    assert select_tokens(signals, case.visual, case.query, budget).shape == (budget,)

"""A row's result is the same, bit for bit, whatever it travels with."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from msdg_vllm.core import (
    ImageSignals,
    analysis,
    analyze_image,
    score_tokens,
    select_tokens,
)
from msdg_vllm.core.profiles import EncoderProfile
from tests.unit.core.cases import make_profile

pytestmark = pytest.mark.usefixtures("_rows_together")


@pytest.fixture(params=[1, 2])
def _num_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def make_batch(
    num_rows: int, num_tokens: int, width: int, patches_per_token: int = 1, seed: int = 0
) -> tuple[dict[int, Tensor], Tensor, Tensor, Tensor, EncoderProfile]:
    """Rows that differ in sinks, copies, zero directions, finiteness and speed of convergence."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    num_patches = num_tokens * patches_per_token
    profile = make_profile(num_groups=min(20, num_tokens), seed=5)
    states = {n: normal(num_rows, num_patches, width) for n in profile.layers}
    states[3].clamp_(-49, 49)
    for row in range(num_rows):
        states[3][row, : row * num_patches // (2 * num_rows), 1] = 60.0 + row
        match row % 4:
            case 1:  # copies: K-means over ties
                source = torch.randint(num_patches, (num_patches,), generator=generator) // 3
                for state in states.values():
                    state[row] = state[row, source]
            case 2:  # tight clusters: converges at once
                centers = normal(3, width)
                states[5][row] = centers[torch.arange(num_patches) % 3]
                states[5][row] += 0.01 * normal(num_patches, width)
            case 3:
                states[5][row] = states[0][row]
                states[4][row, -1] = torch.nan
    visual = normal(num_rows, num_tokens, width + 3)
    query = normal(num_rows, 3, width + 3)
    valid = torch.rand(num_rows, num_tokens, generator=generator) < 0.9
    return states, visual, query, valid, profile


def assert_same(first: ImageSignals, second: ImageSignals) -> None:
    """Every tensor has the same bits."""
    for name in ("saliency", "groups", "num_groups", "sink_mask", "sink_activation"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


@pytest.mark.usefixtures("_num_threads")
@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "width", "patches_per_token"),
    [(5, 40, 8, 1), (4, 7, 5, 1), (3, 1, 3, 1), (6, 61, 33, 1), (4, 23, 12, 4), (5, 144, 64, 1)],
)
def test_a_batch_equals_its_rows_one_by_one(
    num_rows: int, num_tokens: int, width: int, patches_per_token: int
) -> None:
    for seed in range(1 if torch.get_num_threads() > 1 else 3):
        states, visual, query, valid, profile = make_batch(
            num_rows, num_tokens, width, patches_per_token, seed
        )
        budget = max(1, num_tokens // 3)
        together = analyze_image(states, profile, patches_per_token, valid=valid)
        scores = score_tokens(together, visual, query)
        keep = select_tokens(together, visual, query, budget)
        shared = select_tokens(together, visual, query[0], budget)
        for row in range(num_rows):
            # A copy as well as a view: memory may be aligned otherwise.
            for own in (torch.Tensor.detach, torch.Tensor.clone):
                x, t = own(visual[row]), own(query[row])
                alone = analyze_image(
                    {n: own(state[row]) for n, state in states.items()},
                    profile,
                    patches_per_token,
                    valid=valid[row],
                )
                assert_same(alone, together[row])
                assert torch.equal(score_tokens(alone, x, t).score, scores.score[row])
                assert torch.equal(score_tokens(alone, x, t).relevance, scores.relevance[row])
                assert torch.equal(select_tokens(alone, x, t, budget), keep[row])
                assert torch.equal(select_tokens(alone, x, query[0].clone(), budget), shared[row])


@pytest.mark.usefixtures("_num_threads")
def test_a_row_is_the_same_in_every_batch() -> None:
    states, visual, query, valid, profile = make_batch(7, 50, 20)
    whole = analyze_image(states, profile, valid=valid)
    for rows in ([0, 1], [6, 5, 4, 3, 2, 1, 0], [3, 3, 3], [2, 6, 2]):
        part = analyze_image({n: s[rows] for n, s in states.items()}, profile, valid=valid[rows])
        assert_same(part, whole[torch.tensor(rows)])
        keep = select_tokens(part, visual[rows], query[rows], 9)
        assert torch.equal(keep, select_tokens(whole, visual, query, 9)[rows])


@pytest.mark.usefixtures("_num_threads")
def test_the_sizes_of_a_real_encoder_give_the_same_bits_in_a_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    profile = make_profile(num_groups=20)
    states = {n: torch.randn(3, 576, 256, generator=generator) for n in profile.layers}
    visual = torch.randn(3, 576, 512, generator=generator)
    query = torch.randn(16, 512, generator=generator)
    together = analyze_image(states, profile)
    scores = score_tokens(together, visual, query)
    for row in range(3):
        alone = analyze_image({n: state[row].clone() for n, state in states.items()}, profile)
        assert_same(alone, together[row])
        assert torch.equal(score_tokens(alone, visual[row], query).score, scores.score[row])


def test_rows_handled_one_by_one_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    states, _, _, valid, profile = make_batch(5, 50, 20)
    together = analyze_image(states, profile, valid=valid)
    for step in (1, 2, 3, 9):
        monkeypatch.setattr(analysis, "_ROWS_AT_ONCE", {"cpu": step})
        assert_same(analyze_image(states, profile, valid=valid), together)


def test_several_leading_dimensions_are_kept() -> None:
    states, visual, query, valid, profile = make_batch(6, 20, 6)
    flat = analyze_image(states, profile, valid=valid)
    nested = analyze_image(
        {n: s.unflatten(0, (2, 3)) for n, s in states.items()},
        profile,
        valid=valid.unflatten(0, (2, 3)),
    )
    assert nested.groups.shape == (2, 3, 20)
    assert nested.num_groups.shape == (2, 3)
    assert torch.equal(nested.groups.flatten(0, 1), flat.groups)
    keep = select_tokens(nested, visual.unflatten(0, (2, 3)), query.unflatten(0, (2, 3)), 4)
    assert keep.shape == (2, 3, 4)
    assert torch.equal(keep.flatten(0, 1), select_tokens(flat, visual, query, 4))


def test_states_may_be_views_that_skip_a_row() -> None:
    # As when the class token is dropped from an encoder's output.
    states, _, _, _, profile = make_batch(3, 20, 16)
    longer = {n: torch.cat([s.new_ones(3, 1, 16), s], dim=1)[:, 1:] for n, s in states.items()}
    assert not longer[0].is_contiguous()
    assert_same(analyze_image(longer, profile), analyze_image(states, profile))


@pytest.mark.usefixtures("_num_threads")
def test_the_same_input_gives_the_same_output() -> None:
    states, visual, query, valid, profile = make_batch(4, 90, 24)
    first = analyze_image(states, profile, valid=valid)
    keep = select_tokens(first, visual, query, 11)
    for _ in range(3):
        again = analyze_image(states, profile, valid=valid)
        assert_same(again, first)
        assert torch.equal(select_tokens(again, visual, query, 11), keep)

"""Farthest-point seeding and spherical k-means, rule by rule."""

import math

import pytest
import torch
from torch import Tensor

from msdg_vllm.core import analyze_image
from msdg_vllm.core.grouping import _add_up, _centroids, _Limits
from tests.reference import Selection, select_reference
from tests.unit.core.cases import make_profile


def states_with_directions(directions: Tensor) -> dict[int, Tensor]:
    """States whose update directions are the given unit vectors, or zero."""
    zeros = torch.zeros_like(directions)
    moved = zeros.clone()
    moved[:, 0] = torch.arange(len(directions)) % 64 / 64  # saliency without near ties
    return {0: zeros, 2: zeros, 3: zeros, 4: moved, 5: directions}


def at_angles(degrees: list[float]) -> Tensor:
    """Unit vectors in the plane."""
    angles = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    return torch.stack([angles.cos(), angles.sin()], dim=-1).float()


def group(directions: Tensor, num_groups: int, seed: int = 0) -> list[int]:
    """Labels of the directions."""
    states = states_with_directions(directions)
    labels: list[int] = analyze_image(states, make_profile(num_groups, seed)).groups.tolist()
    return labels


def reference(directions: Tensor, num_groups: int, seed: int = 0) -> Selection:
    """What the reference makes of the directions."""
    states = {n: state.numpy() for n, state in states_with_directions(directions).items()}
    no_query = torch.zeros(0, 2).numpy()
    profile = make_profile(num_groups, seed)
    return select_reference(states, torch.ones(len(directions), 2).numpy(), no_query, 1, profile)


def test_tokens_that_turn_alike_share_a_group() -> None:
    assert group(at_angles([0, 120, 3, 240, 118, 241]), 3) == [0, 1, 0, 2, 1, 2]


def test_the_first_centroid_is_the_candidate_number_seed_mod_m() -> None:
    directions = at_angles([0, 90, 180, 270])
    for seed in range(-3, 9):
        # Each token is a group; the first group is that of the first centroid.
        assert group(directions, 4, seed)[seed % 4] == 0


def test_sinks_do_not_count_for_the_first_centroid() -> None:
    states = states_with_directions(at_angles([0, 90, 180, 270, 45]))
    states[3] = torch.zeros(5, 2)
    states[3][1:3, 1] = 99.0
    signals = analyze_image(states, make_profile(3, seed=1))
    assert signals.groups.tolist()[3] == 0
    assert signals.groups.tolist()[1:3] == [-1, -1]


def test_the_next_centroid_is_the_farthest_and_the_first_of_equals() -> None:
    east, north, west, south = [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]
    # From east west is farthest; then north and south tie.
    assert group(torch.tensor([east, north, west, south]), 4) == [0, 2, 1, 3]
    assert group(torch.tensor([east, south, west, north]), 4) == [0, 2, 1, 3]


def test_a_token_as_near_to_two_centroids_takes_the_lower_group() -> None:
    zero = torch.zeros(1, 2)
    # A direction of zero is as near to every centroid.
    assert group(torch.cat([at_angles([0, 180]), zero]), 2) == [0, 1, 0]


@pytest.mark.parametrize("num_copies", [2, 7, 33])
@pytest.mark.parametrize("width", [3, 16, 50])
def test_equal_directions_share_a_group_wherever_they_stand(num_copies: int, width: int) -> None:
    generator = torch.Generator().manual_seed(num_copies * width)
    distinct = torch.nn.functional.normalize(torch.randn(5, width, generator=generator), dim=-1)
    order = torch.randperm(5 * num_copies, generator=generator) % 5
    # More groups than distinct directions: the others stay empty.
    labels = torch.tensor(group(distinct[order], 12))
    for which in range(5):
        assert len(set(labels[order == which].tolist())) == 1
    assert sorted(set(labels.tolist())) == [0, 1, 2, 3, 4]


def test_a_zero_direction_can_seed_a_group_that_stays_empty() -> None:
    # It is the second seed, farther than all that lean towards the first, but keeps no token: not
    # even itself, as it is as near to group 0.
    directions = torch.cat([at_angles([0, 10, 70, 80, 85]), torch.zeros(1, 2)])
    expected = reference(directions, 3)
    assert expected.num_reseeded > 0
    assert expected.margin > 1
    assert group(directions, 3) == expected.groups == [0, 0, 2, 2, 2, 0]


def test_empty_groups_start_again_from_the_tokens_least_like_their_centroids() -> None:
    directions = at_angles([float(10 * i) for i in range(16)])
    labels = torch.tensor([[1, 3] * 8])
    labels[0, 5] = -1
    nearest = torch.full((1, 16), 0.9)
    nearest[0, [5, 9, 2, 7, 3]] = torch.tensor([torch.inf, 0.2, 0.3, 0.3, 0.4])
    active = torch.tensor([[True] * 6 + [False] * 2])
    groups = _add_up([directions], labels, _Limits.of(labels >= 0, active).bags)
    (centroids,) = _centroids(groups, [directions], nearest, active)
    # Groups 0, 2, 4 and 5 are empty: tokens 9, 2, 7 (ties by order) and 3; 5 is no candidate.
    assert torch.equal(centroids[[0, 2, 4, 5]], directions[[9, 2, 7, 3]])
    for which in (1, 3):
        total = directions[labels[0] == which].sum(dim=0)
        torch.testing.assert_close(centroids[which], total / total.norm())


def test_grouping_stops_at_ten_iterations() -> None:
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(400, 3, generator=generator)
    directions = directions / directions.norm(dim=-1, keepdim=True)
    expected = reference(directions, 3)
    assert expected.stopped_by == "limit"
    assert expected.margin > 1
    assert group(directions, 3) == expected.groups


@pytest.mark.parametrize(
    ("arc_size", "stopped_by", "last_labels"),
    [(2000, "loss", [0, 0, 1]), (1200, "labels", [0, 0, 0])],
)
def test_grouping_stops_when_the_loss_changes_by_less_than_1e_5_of_itself(
    arc_size: int, stopped_by: str, last_labels: list[int]
) -> None:
    # Two dense arcs and three tokens between them that change sides one after the other. When the
    # second does, the loss changes by 6e-6 or 1.6e-5 of itself; the third follows if not stopped.
    left, right = torch.linspace(-24, 20, arc_size), torch.linspace(70, 110, arc_size)

    def border(with_left: list[float], with_right: list[float]) -> float:
        arcs = ([*left.tolist(), *with_left], [*right.tolist(), *with_right])
        sums = [at_angles(arc).double().sum(dim=0) for arc in arcs]
        return math.degrees(sum(math.atan2(float(y), float(x)) for x, y in sums)) / 2

    first = 43.5
    second = (border([], [first, 43.98, 44.0]) + border([first], [43.98, 44.0])) / 2
    third = (border([first], [second, 44.0]) + border([first, second], [44.0])) / 2
    directions = at_angles([*left.tolist(), *right.tolist(), first, second, third])
    expected = reference(directions, 2)
    assert expected.stopped_by == stopped_by
    assert expected.margin > 1
    assert group(directions, 2) == expected.groups
    assert expected.groups[-3:] == last_labels


def test_scaling_all_states_leaves_the_groups() -> None:
    generator = torch.Generator().manual_seed(1)
    states = {n: torch.randn(90, 12, generator=generator) for n in (0, 2, 3, 4, 5)}
    groups = analyze_image(states, make_profile(7)).groups
    for scale in (1e-3, 0.5, 3.0, 16.0):
        scaled = {n: state * scale for n, state in states.items()}
        assert torch.equal(analyze_image(scaled, make_profile(7)).groups, groups)

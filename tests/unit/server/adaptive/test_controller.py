"""Retention follows the load, keeps the target, and comes back."""

import pytest

from server.adaptive import costs
from server.adaptive.controller import Arrival, Controller, Decision, Image, ladder
from tests.unit.server.adaptive.queueing import (
    FULL_SERVICE,
    IMAGE_TOKENS,
    TEXT_TOKENS,
    PrivateLoad,
    Served,
    serve,
)

TARGET = 1.0
STEP = ((0.3, 30.0), (2.0, 30.0), (0.5, 40.0))


def make_controller(floor: float = 0.111, ceiling: float = 1.0) -> Controller:
    return Controller(PrivateLoad(), target=TARGET, floor=floor, ceiling=ceiling)


def share_within(served: list[Served]) -> float:
    return sum(request.seconds <= TARGET for request in served) / len(served)


def mean_retention(served: list[Served]) -> float:
    return sum(request.retention for request in served) / len(served)


def decide(controller: Controller, now: float, identity: int = 1) -> Decision:
    image = Image(identity, IMAGE_TOKENS)
    return controller.arrive(Arrival(TEXT_TOKENS, IMAGE_TOKENS, [image]), now)


@pytest.mark.parametrize("seed", range(3))
def test_a_target_that_full_images_miss_is_held_above_the_floor(seed: int) -> None:
    full = serve(make_controller(), STEP, retention=1.0, seed=seed)
    floor = serve(make_controller(), STEP, retention=0.111, seed=seed)
    held = serve(make_controller(), STEP, seed=seed)
    assert share_within(full) < 0.5
    assert share_within(floor) > 0.95
    assert share_within(held) >= 0.9
    assert mean_retention(held) > 2 * 0.111


@pytest.mark.parametrize("seed", range(3))
def test_the_ceiling_is_back_within_thirty_targets_of_the_load_going(seed: int) -> None:
    served = serve(make_controller(), STEP, seed=seed)
    late = [request for request in served if request.arrived > 60 + 30 * TARGET]
    assert mean_retention(late) > 0.85


def test_a_light_load_is_not_pruned() -> None:
    served = serve(make_controller(), ((0.2, 60.0),))
    assert mean_retention(served) > 0.97


@pytest.mark.parametrize("factor", [0.1, 40.0])
def test_a_wrong_start_estimate_does_not_matter(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = serve(make_controller(), STEP)
    monkeypatch.setattr(costs, "_PRIOR", costs._PRIOR * factor)
    wrong = serve(make_controller(), STEP)
    assert share_within(wrong) == pytest.approx(share_within(right), abs=0.05)
    assert mean_retention(wrong) == pytest.approx(mean_retention(right), abs=0.06)


def test_costs_are_learnt_from_first_tokens() -> None:
    load = PrivateLoad()
    controller = Controller(load, target=TARGET, floor=0.111, ceiling=1.0)
    serve(controller, STEP)
    learnt = costs.Costs(load.load).seconds(1, TEXT_TOKENS + IMAGE_TOKENS, IMAGE_TOKENS)
    assert learnt == pytest.approx(FULL_SERVICE, rel=0.15)


def test_an_image_keeps_the_retention_it_had() -> None:
    controller = make_controller()
    serve(controller, ((0.3, 20.0), (3.0, 20.0)))
    first = decide(controller, 40.0, identity=10**9)
    assert first.retentions[0] < 0.5
    # The load is gone; the conversation goes on and keeps its prefix.
    again = decide(controller, 40.0 + 20 * TARGET, identity=10**9)
    assert (again.retentions, again.reasons) == (first.retentions, ["sticky"])
    other = decide(controller, 40.0 + 20 * TARGET, identity=10**9 + 1)
    assert other.retentions[0] == 1.0


def test_an_idle_image_is_decided_anew() -> None:
    controller = make_controller()
    serve(controller, ((0.3, 20.0), (3.0, 20.0)))
    assert decide(controller, 40.0, identity=10**9).retentions[0] < 0.5
    assert decide(controller, 140.0, identity=10**9).retentions == [1.0]


def test_every_image_of_a_request_gets_the_same_level() -> None:
    controller = make_controller()
    serve(controller, ((0.3, 20.0), (3.0, 20.0)))
    images = [Image(10**9 + number, IMAGE_TOKENS) for number in range(3)]
    decision = controller.arrive(Arrival(TEXT_TOKENS, 3 * IMAGE_TOKENS, images), 40.0)
    assert len(set(decision.retentions)) == 1


def test_an_image_costs_no_more_than_the_count_it_may_keep() -> None:
    controller = make_controller()
    free, few = (
        controller.arrive(Arrival(0, 0, [Image(1, IMAGE_TOKENS, most)]), 0.0).reservation
        for most in (float("inf"), 100)
    )
    assert (free.work[1], few.work[1]) == (IMAGE_TOKENS, 100)


def test_a_burst_is_met_before_the_level_moves() -> None:
    controller = make_controller()
    serve(controller, ((0.3, 60.0),))
    burst = [decide(controller, 60.0, identity=10**9 + number) for number in range(12)]
    assert burst[0].retentions == [1.0]
    assert {reason for decision in burst for reason in decision.reasons} & {"burst", "floor"}
    assert burst[-1].retentions[0] < 1.0


def test_what_is_released_no_longer_waits() -> None:
    controller = make_controller()
    serve(controller, ((0.3, 60.0),))
    before = controller.status(60.0).backlog_seconds
    waiting = [decide(controller, 60.0, identity=number + 10**9) for number in range(5)]
    assert controller.status(60.0).backlog_seconds > before
    for decision in waiting:
        controller.release(decision.reservation)
        controller.release(decision.reservation)  # giving it back again changes nothing
    assert controller.status(60.0).backlog_seconds == before


def test_an_overload_at_the_floor_is_seen() -> None:
    controller = make_controller(floor=0.333)
    serve(controller, ((5.0, 30.0),))
    status = controller.status(30.0)
    assert status.level == 0.333
    assert status.is_overloaded


@pytest.mark.parametrize(
    ("floor", "ceiling", "rungs"),
    [
        (0.111, 1.0, (1.0, 0.75, 0.5, 0.333, 0.222, 0.167, 0.111)),
        (0.3, 0.5, (0.5, 0.333, 0.3)),
        (0.2, 0.2, (0.2,)),
    ],
)
def test_the_ladder_goes_from_the_ceiling_to_the_floor(
    floor: float, ceiling: float, rungs: tuple[float, ...]
) -> None:
    assert ladder(floor, ceiling) == rungs

"""The window: on towers whose foreground window is known, scan and vote find it."""

from collections.abc import Sequence

import numpy as np
import pytest

from msdg_vllm.calibration.looking import Record
from msdg_vllm.calibration.sink_stage import find_sinks
from msdg_vllm.calibration.window import Window, choose_window, vote
from tests.unit.calibration.towers import LAYERS, Planted, SyntheticTower, records

WIDTH = 3


def gain(layers: range, value: float, late: float = 0.0) -> list[float]:
    """A gain in some layers, and another in the last four."""
    gains = [0.0] * LAYERS
    gains[-4:] = [late] * 4
    for layer in layers:
        gains[layer] = value
    return gains


def chosen(looks: Sequence[Record]) -> Window:
    return choose_window(looks, find_sinks(looks), WIDTH)


def recall_of(tower: SyntheticTower, window: Window) -> tuple[float, float]:
    """Recall of the window, and of the best one, on pictures that were not looked at."""
    assert window.chosen is not None
    fresh = np.mean([r["recall"] for r in records(tower, 30, masks=True, first=500)], axis=0)
    return float(fresh[window.chosen[0]]), float(fresh.max())


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("layers", [range(1, 4), range(7, 10)])
def test_scan_and_vote_find_the_foreground_window(layers: range, masks: bool) -> None:
    tower = SyntheticTower(gain=gain(layers, 1.2))
    window = chosen(records(tower, 40, masks=masks))
    assert window.source == ("scan" if masks else "vote")
    found, best = recall_of(tower, window)
    assert found >= best - 0.02


@pytest.mark.parametrize("masks", [True, False])
def test_layers_that_move_the_background_are_not_chosen(masks: bool) -> None:
    tower = SyntheticTower(gain=gain(range(2, 5), 0.8, late=-0.8))
    window = chosen(records(tower, 40, masks=masks))
    assert window.chosen is not None
    assert window.chosen[1] <= LAYERS - 4
    found, best = recall_of(tower, window)
    assert found >= best - 0.02


def test_with_sinks_the_papers_rule_decides_and_masks_may_object() -> None:
    early = SyntheticTower(gain=gain(range(1, 4), 1.2), sinks=Planted(layer=5))
    window = chosen(records(early, 30, masks=True))
    assert (window.source, window.chosen) == ("paper", (7, 10))
    assert window.confidence == "low"
    assert any("The masks disagree" in reason for reason in window.reasons)
    late = SyntheticTower(gain=gain(range(7, 10), 1.2), sinks=Planted(layer=5))
    window = chosen(records(late, 30, masks=True))
    assert (window.source, window.chosen, window.confidence) == ("paper", (7, 10), "high")


def test_cues_that_disagree_turn_saliency_off() -> None:
    # The output features show no foreground, so nothing can speak for any window.
    looks = records(SyntheticTower(noise=0.5), 20, masks=False)
    for look in looks:
        look["cut"] = np.full_like(look["cut"], 0.5)
    window = chosen(looks)
    assert (window.source, window.chosen, window.confidence) == ("off", None, "low")
    assert any("The cues disagree" in reason for reason in window.reasons)


def test_a_window_no_better_than_chance_turns_saliency_off() -> None:
    looks = records(SyntheticTower(), 20, masks=True)
    for number, look in enumerate(looks):
        look["recall"] = np.full_like(look["recall"], 0.25 + 0.1 * (number % 2))
    window = chosen(looks)
    assert (window.source, window.chosen) == ("off", None)
    assert window.is_flat


def test_the_vote_is_a_sum_of_ranks() -> None:
    first, second = np.array([0.9, 0.8, 0.1]), np.array([0.1, 0.3, 0.2])
    assert vote([first, second]) == 1
    assert vote([first, first]) == 0

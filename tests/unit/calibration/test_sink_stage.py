"""Sinks that were planted are found, and what is no sink stage is not taken for one."""

import numpy as np
import pytest

from msdg_vllm.calibration.sink_stage import find_sinks
from tests.unit.calibration.towers import LAYERS, Planted, SyntheticTower, picture, records


@pytest.mark.parametrize(("ratio", "number"), [(4.0, 60), (12.0, 3)])
def test_planted_sinks_are_recovered(ratio: float, number: int) -> None:
    tower = SyntheticTower(sinks=Planted(ratio=ratio))
    sinks = find_sinks(records(tower, number, masks=True))
    assert sinks.verdict == "found"
    assert (sinks.peak, sinks.stage, sinks.coordinate) == (5, (5, 5), 17)
    # The threshold parts planted tokens from all others in pictures that were not looked at.
    assert sinks.threshold is not None
    caught = missed = wrong = 0
    for seed in range(200, 220):
        states = tower.encode(picture(seed)[0]).states
        moved = (states[6] - states[5]).norm(dim=-1)
        planted = moved > 0.5 * ratio * moved.median()
        told = states[6][:, 17].abs() > sinks.threshold
        caught += int((planted & told).sum())
        missed += int((planted & ~told).sum())
        wrong += int((~planted & told).sum())
    assert missed <= 0.05 * caught
    assert wrong <= 0.05 * caught


def test_sinks_at_twice_the_usual_update_are_not_told_from_other_tokens() -> None:
    sinks = find_sinks(records(SyntheticTower(sinks=Planted(ratio=2.0)), 30, masks=True))
    assert sinks.verdict == "none"
    assert sinks.threshold is None


def test_two_coordinates_are_said_and_no_threshold_is_written() -> None:
    tower = SyntheticTower(sinks=Planted(coordinates=(3, 40)))
    sinks = find_sinks(records(tower, 30, masks=True))
    assert sinks.verdict == "several coordinates"
    assert (sinks.stage, sinks.coordinate, sinks.threshold) == (None, None, None)
    assert any("3 (" in reason and "40 (" in reason for reason in sinks.reasons)


def test_sinks_in_few_images_are_said_and_no_threshold_is_written() -> None:
    tower = SyntheticTower(sinks=Planted(share_of_images=0.4))
    sinks = find_sinks(records(tower, 40, masks=True))
    assert sinks.verdict == "too few images"
    assert sinks.threshold is None
    assert 0.2 < sinks.share_of_images < 0.6


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_a_peak_at_the_first_or_last_layer_is_no_sink_stage(layer: int) -> None:
    sinks = find_sinks(records(SyntheticTower(sinks=Planted(layer=layer)), 20, masks=True))
    assert sinks.verdict == "none"
    assert int(np.argmax(sinks.ratios)) == layer
    assert "no sink stage" in sinks.reasons[0]

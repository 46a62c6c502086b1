"""Coverage: measures by hand, and what each way of choosing keeps."""

import numpy as np
import torch

from msdg_vllm.calibration.coverage import effective_groups, keep_by_all, measure
from msdg_vllm.calibration.masks import Annotation
from msdg_vllm.core.analysis import ImageSignals
from msdg_vllm.core.profiles import EncoderProfile
from tests.unit.calibration.towers import SyntheticTower, picture


def test_measures_by_hand() -> None:
    areas = np.array([[1.0, 0.5, 0, 0, 0], [0, 0, 0.1, 0.3, 0]], np.float32)
    labels = np.array([1, 1, 2, 2, 3])
    annotation = Annotation(areas, np.ones(5, np.float32), labels)
    everything = np.ones(5, bool)
    area, hit, present = measure(np.array([1, 2]), annotation, everything)
    assert np.isclose(area, (0.5 / 1.5 + 0.1 / 0.4) / 2)
    assert hit == 0.5  # of the second instance only the token it covers most would show it
    assert np.isclose(present, 2 / 3)
    assert measure(np.array([0, 3, 4]), annotation, everything)[1:] == [1.0, 1.0]


def test_an_image_without_instances_has_no_area() -> None:
    empty = Annotation(np.zeros((0, 3), np.float32), np.ones(3, np.float32), np.full(3, -1))
    assert np.isnan(measure(np.array([0]), empty, np.ones(3, bool))).all()


def test_every_way_keeps_the_budget_and_never_padding() -> None:
    tower = SyntheticTower()
    encoded = tower.encode(picture(1)[0])
    encoded.valid[:30] = False
    bare = EncoderProfile((2, 11), None, sink_layer=None, sink_coordinate=None)
    full = EncoderProfile((2, 11), (4, 7), sink_layer=5, sink_coordinate=3)
    for profile, ways in ((full, 8), (bare, 6)):
        kept = keep_by_all(encoded, profile, tower.info, 0.5)
        assert len(kept.tokens) == ways
        for by_retention in kept.tokens.values():
            assert [len(indices) for indices in by_retention] == [38, 25, 13]
            assert all(indices.min() >= 30 for indices in by_retention)
            assert all(len(set(indices)) == len(indices) for indices in by_retention)


def test_effective_groups_is_the_perplexity_of_the_shares() -> None:
    def signals(*saliency: float) -> ImageSignals:
        groups = torch.arange(len(saliency))
        zeros = torch.zeros(len(saliency))
        values = torch.tensor(saliency)
        return ImageSignals(
            values, groups, torch.tensor(len(saliency)), zeros.bool(), zeros, len(saliency)
        )

    assert np.isclose(effective_groups(signals(1.0, 1.0, 1.0, 1.0)), 4)
    assert np.isclose(effective_groups(signals(90.0, 0.0, 0.0)), 1)

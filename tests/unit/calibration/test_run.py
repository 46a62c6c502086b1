"""A whole run on a synthetic tower: profile, report, warnings, refusals, resumption."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from msdg_vllm.calibration.checking import summarize
from msdg_vllm.calibration.coverage import DIVPRUNE
from msdg_vllm.calibration.images import find_images, num_near_duplicates
from msdg_vllm.calibration.masks import open_masks
from msdg_vllm.calibration.records import Records
from msdg_vllm.calibration.report import next_steps, render
from msdg_vllm.calibration.run import Calibration, calibrate
from msdg_vllm.core.errors import CalibrationError
from msdg_vllm.core.profiles import EncoderProfile
from tests.unit.calibration.towers import LAYERS, Planted, SyntheticTower, changed, write_pictures

NUMBER = 24
EARLY = [0.0, 0.0, 1.2, 1.2, 1.2, *[0.0] * 3, *[-0.8] * 4]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_pictures(tmp_path_factory.mktemp("calibration") / "photos", NUMBER)


def run(tower: SyntheticTower, paths: list[Path], work: Path, *, masks: bool = True) -> Calibration:
    source = open_masks(paths[0].parent.with_name("photos-masks")) if masks else None
    return calibrate(tower, paths, source, 3, Records(work, {}))


@pytest.fixture(scope="module")
def with_masks(photos: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    tower = SyntheticTower(gain=EARLY, sinks=Planted(layer=6))
    return run(tower, photos, tmp_path_factory.mktemp("work"))


def test_the_profile_says_where_it_comes_from(with_masks: Calibration, tmp_path: Path) -> None:
    with_masks.profile.save(tmp_path / "profile.json")
    profile = EncoderProfile.load(tmp_path / "profile.json")
    assert (profile.sink_layer, profile.sink_coordinate) == (6, 17)
    assert profile.direction_layers == (2, LAYERS - 1)
    assert profile.output_layer == LAYERS
    told = profile.provenance
    assert told is not None
    assert told["model"] == "synthetic"
    assert told["encoder"]["sha256"] == "0" * 64
    assert told["images"] == {"used": NUMBER, "unreadable": 0, "annotated": NUMBER}
    assert told["verdicts"]["sinks"] == "found"
    assert told["validated_by_masks"] is True
    assert told["tool"].startswith("msdg-vllm calibrate ")


def test_the_report_needs_nothing_from_outside(with_masks: Calibration) -> None:
    page = render(with_masks)
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "@import" not in page
    assert "<script" not in page
    assert page.count("<svg") >= 5
    # Six rows of maps: the image, every layer, the window; and six pairs at 1/9.
    assert page.count("<img") >= 6 * (LAYERS + 1) + 12
    for words in ("What was chosen", "What to try next", "Sinks: found", "sink stage", "DivPrune"):
        assert words in page


def test_the_table_compares_with_simpler_ways(with_masks: Calibration) -> None:
    coverage = with_masks.checks.coverage
    assert {"this profile", "random", "centre of the image"} <= set(coverage)
    assert all(curve.mean.shape == (9,) for curve in coverage.values())
    assert coverage["random"].mean[0] < coverage["groups, equal shares, random ranking"].mean[0]
    assert with_masks.checks.anchors > 20


def test_a_simpler_way_that_covers_more_is_what_to_try_next(with_masks: Calibration) -> None:
    assert not any("DivPrune" in step for step in next_steps(with_masks))
    records = []
    for record in with_masks.checks.records:
        coverage = np.full_like(record["coverage"], 0.5)
        coverage[record["coverage_names"] == DIVPRUNE] = 1.0
        records.append({**record, "coverage": coverage})
    better = replace(with_masks, checks=summarize(records))
    (step,) = (step for step in next_steps(better) if "DivPrune" in step)
    assert "covers 50.0% more than this profile" in step
    assert "`divprune`" in step


def test_an_interrupted_run_goes_on_where_it_stopped(photos: list[Path], tmp_path: Path) -> None:
    class Stopped(SyntheticTower):
        def encode(self, image: Image.Image) -> object:  # type: ignore[override]
            if self.encoded == 10:
                raise KeyboardInterrupt
            return super().encode(image)

    with pytest.raises(KeyboardInterrupt):
        run(Stopped(gain=EARLY), photos, tmp_path / "work")
    rest = SyntheticTower(gain=EARLY)
    resumed = run(rest, photos, tmp_path / "work")
    whole = SyntheticTower(gain=EARLY)
    assert resumed.profile == run(whole, photos, tmp_path / "other").profile
    assert whole.encoded - rest.encoded == 10


def test_records_of_another_run_are_not_used(tmp_path: Path) -> None:
    Records(tmp_path / "work", {"width": 3}).put("look-0", {"ratio": np.ones(3)})
    assert Records(tmp_path / "work", {"width": 3}).get("look-0") is not None
    assert Records(tmp_path / "work", {"width": 5}).get("look-0") is None


def test_unreadable_images_are_skipped_and_counted(photos: list[Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(photos[0].read_bytes()[:100])
    found = run(SyntheticTower(gain=EARLY), [*photos, broken], tmp_path / "work", masks=False)
    assert found.images == {"used": NUMBER, "unreadable": 1, "annotated": 0}


def test_without_masks_a_collapsed_softmax_turns_saliency_off(
    photos: list[Path], tmp_path: Path
) -> None:
    loud = SyntheticTower(gain=EARLY, norms=[1.0, 1.0, *[40.0] * 3, *[1.0] * 7])
    found = run(loud, photos, tmp_path / "loud", masks=False)
    assert found.window.source == "vote"
    assert found.profile.saliency_window is None
    assert any("collapsed" in reason for reason in found.settled.reasons)
    quiet = run(SyntheticTower(gain=EARLY), photos, tmp_path / "quiet", masks=False)
    assert quiet.profile.saliency_window == quiet.window.chosen is not None
    assert quiet.profile.provenance is not None
    assert quiet.profile.provenance["validated_by_masks"] is False


def test_updates_that_collapse_the_softmax_are_seen(photos: list[Path], tmp_path: Path) -> None:
    loud = SyntheticTower(gain=EARLY, norms=[1.0, 1.0, *[40.0] * 3, *[1.0] * 7])
    found = run(loud, photos, tmp_path / "work")
    assert found.checks.effective_groups < 10


def test_what_speaks_against_a_calibration_is_said(photos: list[Path], tmp_path: Path) -> None:
    grown = changed(SyntheticTower(gain=EARLY, norms=[*[1.0] * 10, 9.0, 9.0]), global_layers=(2, 5))
    said = "\n".join(run(grown, photos, tmp_path / "work").warnings)
    assert f"Only {NUMBER} images" in said
    assert "All images are 96 x 96" in said
    assert "The updates of layers 8, 9, 10, 11 lie mostly on the background" in said
    assert "Updates grow towards the output" in said
    assert "Attention spans the image only in layers 2, 5" in said
    doubled = run(SyntheticTower(gain=EARLY), photos[:20] + photos[:4], tmp_path / "twice")
    assert any("images look like another" in warning for warning in doubled.warnings)


def test_too_few_images_or_masks_are_refused(photos: list[Path], tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="19 images are too few: at least 20"):
        run(SyntheticTower(), photos[:19], tmp_path / "a")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos-masks").mkdir()
    bare = [tmp_path / "photos" / path.name for path in photos]
    for new, old in zip(bare, photos, strict=True):
        new.write_bytes(old.read_bytes())
    with pytest.raises(CalibrationError, match="--masks fits 0 of the images"):
        run(SyntheticTower(), bare, tmp_path / "b")
    with pytest.raises(CalibrationError, match="--width must be from 1 to 11"):
        calibrate(SyntheticTower(), photos, None, 12, Records(tmp_path / "c", {}))


def test_an_empty_folder_is_an_error_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="no image in"):
        find_images(tmp_path, 200)
    with pytest.raises(CalibrationError, match="--images must be a folder"):
        find_images(tmp_path / "nowhere", 200)


def test_images_are_spread_over_the_folder(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}.jpg").touch()
    assert [path.stem for path in find_images(tmp_path, 4)] == ["0", "3", "6", "9"]


def test_near_duplicates_differ_in_few_bits() -> None:
    draw = np.random.default_rng(0)
    prints = list(draw.random((5, 64)) < 0.5)
    near = prints[0].copy()
    near[:3] ^= True
    assert num_near_duplicates(prints) == 0
    assert num_near_duplicates([*prints, near]) == 1

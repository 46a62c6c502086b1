"""A calibration from first to last: two looks, verdicts, the profile and the report."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from msdg_vllm.calibration.checking import Checks, check, summarize
from msdg_vllm.calibration.findings import find_warnings
from msdg_vllm.calibration.images import MIN_IMAGES, fingerprint_of, read_image
from msdg_vllm.calibration.looking import Record, look
from msdg_vllm.calibration.masks import Annotation, MaskSource, annotate
from msdg_vllm.calibration.records import Records
from msdg_vllm.calibration.sink_stage import Sinks, find_sinks
from msdg_vllm.calibration.tower import Tower, TowerInfo
from msdg_vllm.calibration.window import Window, choose_window
from msdg_vllm.calibration.writing import Settled, draft_profile, settle, with_provenance
from msdg_vllm.core.errors import CalibrationError
from msdg_vllm.core.profiles import EncoderProfile

NUM_SHOWN = 6
_FLIPS = 20  # mirror images that are encoded too, where no masks decide
_CHECKED = 20  # images of the second look without masks
_CHECKED_WITH_MASKS = 40  # at least; a fifth of the images if that is more


@dataclass(frozen=True, slots=True)
class Calibration:
    """All that a run found.

    Attributes:
        info: The tower.
        width: Updates in a window.
        profile: What is written.
        settled: What the second look made of the draft.
        sinks: The verdict about sinks.
        window: The verdict about the window.
        checks: The second look.
        warnings: What speaks against it all.
        records: The first look at each image that could be read.
        images: How many were used, unreadable, annotated.
    """

    info: TowerInfo
    width: int
    profile: EncoderProfile
    settled: Settled
    sinks: Sinks
    window: Window
    checks: Checks
    warnings: Sequence[str]
    records: Sequence[Record]
    images: dict[str, int]


def calibrate(
    tower: Tower, paths: Sequence[Path], masks: MaskSource | None, width: int, records: Records
) -> Calibration:
    """Look at all images, decide, and look at some again with the profile in hand.

    Args:
        tower: The vision tower.
        paths: The images.
        masks: What is where in them; None if that is not known.
        width: Updates in a window.
        records: Where to keep what was measured, and to find what an interrupted run had.
    """
    info = tower.info
    if not 1 <= width < info.num_layers:
        raise CalibrationError(
            f"--width must be from 1 to {info.num_layers - 1} for a tower of {info.num_layers} "
            f"layers, got {width}"
        )
    if len(paths) < MIN_IMAGES:
        raise CalibrationError(
            f"{len(paths)} images are too few: at least {MIN_IMAGES} are needed, 200 are better"
        )
    looks = list(_first_look(tower, paths, masks, width, records))
    used = [record for record in looks if "ratio" in record]
    images = {
        "used": len(used),
        "unreadable": len(looks) - len(used),
        "annotated": sum("recall" in record for record in used),
    }
    if len(used) < MIN_IMAGES:
        raise CalibrationError(
            f"only {len(used)} of {len(paths)} images could be read: at least {MIN_IMAGES} are "
            "needed"
        )
    if masks is not None and images["annotated"] < MIN_IMAGES:
        raise CalibrationError(
            f"--masks fits {images['annotated']} of the images by name: at least {MIN_IMAGES} are "
            "needed; leave --masks out to calibrate without"
        )
    sinks = find_sinks(used)
    window = choose_window(used, sinks, width)
    draft = draft_profile(info, sinks, window)
    start = 0 if window.chosen is None else window.chosen[0]
    scale = 1.0 / float(np.mean([record["window_mean"][start] for record in used]))
    checks = summarize(list(_second_look(tower, paths, looks, masks, width, records, draft, scale)))
    settled = settle(draft, window, checks, scale)
    warnings = find_warnings(used, info, window)
    profile = with_provenance(settled, info, sinks, window, images, warnings)
    return Calibration(info, width, profile, settled, sinks, window, checks, warnings, used, images)


def _first_look(
    tower: Tower, paths: Sequence[Path], masks: MaskSource | None, width: int, records: Records
) -> Iterable[Record]:
    flip_every = max(1, len(paths) // _FLIPS)
    for number, path in enumerate(tqdm(paths, desc="looking", unit="image")):
        record = records.get(f"look-{number}")
        if record is None:
            is_flipped = masks is None and number % flip_every == 0
            record = _look_at(tower, path, masks, width, is_flipped)
            records.put(f"look-{number}", record)
        yield record


def _look_at(
    tower: Tower, path: Path, masks: MaskSource | None, width: int, is_flipped: bool
) -> Record:
    image = read_image(path)
    if image is None:
        return {"unreadable": np.array(True)}
    encoded = tower.encode(image)
    mirror = None
    if is_flipped:
        mirror = tower.encode(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    annotation = _annotation(tower, path, image, masks, len(encoded.valid))
    record = look(encoded, width, tower.info.patches_per_token, annotation, mirror)
    return {**record, "size": np.array(image.size), "fingerprint": fingerprint_of(image)}


def _second_look(
    tower: Tower,
    paths: Sequence[Path],
    looks: Sequence[Record],
    masks: MaskSource | None,
    width: int,
    records: Records,
    draft: EncoderProfile,
    scale: float,
) -> Iterable[Record]:
    name = "ratio" if masks is None else "recall"
    usable = [number for number, record in enumerate(looks) if name in record]
    wanted = _CHECKED if masks is None else max(_CHECKED_WITH_MASKS, len(usable) // 5)
    places = np.linspace(0, len(usable) - 1, min(wanted, len(usable))).round().astype(int)
    for place, number in enumerate(
        tqdm([usable[p] for p in places], desc="checking", unit="image")
    ):
        record = records.get(f"check-{number}")
        if record is None:
            image = read_image(paths[number])
            assert image is not None, "it could be read a moment ago"
            encoded = tower.encode(image)
            annotation = _annotation(tower, paths[number], image, masks, len(encoded.valid))
            view = tower.view(image) if place < NUM_SHOWN else None
            record = check(encoded, draft, tower.info, scale, width, annotation, view)
            records.put(f"check-{number}", record)
        yield record


def _annotation(
    tower: Tower, path: Path, image: Image.Image, masks: MaskSource | None, num_tokens: int
) -> Annotation | None:
    segments = None if masks is None else masks.segments(path, image.size)
    return None if segments is None else annotate(tower, segments, num_tokens)

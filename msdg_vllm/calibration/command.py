"""The command: `msdg-vllm calibrate MODEL --images DIR -o profile.json --report DIR`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from msdg_vllm import __version__
from msdg_vllm.calibration.images import find_images
from msdg_vllm.calibration.masks import open_masks
from msdg_vllm.calibration.records import Records
from msdg_vllm.calibration.report import write_report
from msdg_vllm.calibration.run import Calibration, calibrate
from msdg_vllm.core.errors import CalibrationError

_WORK = "unfinished"  # folder inside the report's, until the run is over


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="msdg-vllm calibrate",
        description="Measure the profile of a model's vision encoder from images.",
    )
    parser.add_argument("model", help="folder or hub name of a vision-language model")
    parser.add_argument("--images", type=Path, required=True, help="folder of photos")
    parser.add_argument(
        "--masks",
        type=Path,
        metavar="DIR|COCO.json",
        help="what is where in them: PNG masks named like the images, COCO instances or panoptic",
    )
    parser.add_argument("--num-images", type=int, default=200, help="default: %(default)s")
    parser.add_argument(
        "--width", type=int, default=5, help="updates in the saliency window; default: %(default)s"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default: %(default)s")
    parser.add_argument("-o", "--output", type=Path, required=True, help="profile to write")
    parser.add_argument("--report", type=Path, required=True, help="folder of the report")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Calibrate, and return the exit code; an error is one sentence on standard error."""
    arguments = make_parser().parse_args(words)
    try:
        calibration = run_calibration(arguments)
    except CalibrationError as error:
        print(f"msdg-vllm calibrate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on where it was", file=sys.stderr)
        return 130
    _print(calibration, arguments)
    return 0


def run_calibration(arguments: argparse.Namespace) -> Calibration:
    """Measure, then write the profile and the report; nothing is written before the end."""
    paths = find_images(arguments.images, arguments.num_images)
    masks = None if arguments.masks is None else open_masks(arguments.masks)
    # Imported here, because it takes seconds and a mistyped folder should not.
    from msdg_vllm.calibration.loading import load_tower

    tower = load_tower(arguments.model, arguments.device)
    key = {
        "version": __version__,
        "encoder": tower.info.digest,
        "layers": tower.info.num_layers,
        "images": [f"{path} {path.stat().st_size}" for path in paths],
        "masks": str(arguments.masks),
        "width": arguments.width,
    }
    records = Records(arguments.report / _WORK, key)
    calibration = calibrate(tower, paths, masks, arguments.width, records)
    write_report(calibration, arguments.report / "index.html")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    draft = arguments.output.with_name(f"{arguments.output.name}.draft")
    calibration.profile.save(draft)
    draft.replace(arguments.output)
    records.remove()
    return calibration


def _print(calibration: Calibration, arguments: argparse.Namespace) -> None:
    lines = [*calibration.sinks.reasons, *calibration.window.reasons, *calibration.settled.reasons]
    print("\n".join(lines))
    for warning in calibration.warnings:
        print(f"warning: {warning}")
    print(f"profile: {arguments.output}\nreport: {arguments.report / 'index.html'}")

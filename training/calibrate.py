"""Calibrate the encoder profile of a bundled model: `python -m training.calibrate`.

Draws training pictures and masks of their items, and hands them to `msdg-vllm calibrate`.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import trange

from benchmarks.quality.drawing import draw_scene
from benchmarks.quality.fine import FINE, sample_fine
from benchmarks.quality.inference import PROFILE
from benchmarks.quality.scenes import Scene, sample_scene
from msdg_vllm.calibration.command import main as calibrate
from training.export import MODELS


def item_mask(scene: Scene, width: int, height: int) -> NDArray[np.uint8]:
    """Return which item covers each pixel of a scene's picture, from 1; 0 is the ground."""
    mask = np.zeros((height, width), np.uint8)
    for number, item in enumerate(scene.items, start=1):
        rows, columns = (
            slice(max(0, round((middle - size / 2) * length)), round((middle + size / 2) * length))
            for middle, size, length in (
                (item.y, item.height, height),
                (item.x, item.width, width),
            )
        )
        mask[rows, columns] = number
    return mask


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=MODELS / "scenes-llava")
    parser.add_argument(
        "--split", choices=["train", FINE], default="train", help="default: %(default)s"
    )
    parser.add_argument("--scenes", type=int, default=256, help="training pictures to look at")
    parser.add_argument("--width", type=int, default=3, help="updates in the saliency window")
    parser.add_argument("--output", type=Path, help=f"default: {PROFILE} in the model's folder")
    parser.add_argument("--report", type=Path, help="default: build/calibration/MODEL")
    arguments = parser.parse_args()
    report = arguments.report or Path("build/calibration", arguments.model.name)
    with tempfile.TemporaryDirectory() as folder:
        images, masks = Path(folder, "images"), Path(folder, "masks")
        images.mkdir()
        masks.mkdir()
        for number in trange(arguments.scenes, desc="drawing"):
            usual = arguments.split == "train"
            scene = sample_scene(number) if usual else sample_fine(number, training=True)
            picture = draw_scene(scene)
            picture.save(images / f"{number:06}.png")
            Image.fromarray(item_mask(scene, *picture.size)).save(masks / f"{number:06}.png")
        return calibrate(
            [
                *(str(arguments.model), "--images", str(images), "--masks", str(masks)),
                *("--num-images", str(arguments.scenes), "--width", str(arguments.width)),
                *("--output", str(arguments.output or arguments.model / PROFILE)),
                *("--report", str(report)),
            ]
        )


if __name__ == "__main__":
    raise SystemExit(main())

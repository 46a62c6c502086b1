"""Whether calibration needs more memory for more images: `python -m benchmarks.calibration.memory`.

The command itself runs on the bundled model, once for each number of images, in a process of its
own; what is printed is the most memory that each ever held.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.shared.pictures import picture
from benchmarks.shared.provenance import ROOT

_MODEL = ROOT / "models" / "scenes-llava"


def peak_mib(images: Path, num_images: int, folder: Path) -> float:
    """Calibrate with the first images of a folder and return the peak of resident memory."""
    command = [sys.executable, "-m", "msdg_vllm.calibration", str(_MODEL)]
    command += ["--images", str(images), "--num-images", str(num_images)]
    command += ["-o", str(folder / f"{num_images}.json"), "--report", str(folder / "report")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"calibration failed: {(folder / 'log').read_text()}")
    return usage.ru_maxrss / 1024


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    help_text = "default: %(default)s"
    parser.add_argument("--num-images", type=int, nargs="+", default=[32, 256], help=help_text)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        images = Path(name, "images")
        images.mkdir()
        for number in range(max(arguments.num_images)):
            picture(number).save(images / f"{number:04}.png")
        for num_images in arguments.num_images:
            print(f"{num_images} images: {peak_mib(images, num_images, Path(name)):.0f} MiB")


if __name__ == "__main__":
    main()

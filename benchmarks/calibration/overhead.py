"""What calibration takes beside the tower itself: `python -m benchmarks.calibration.overhead`.

A tower of CLIP-ViT-L's size with random weights, 576 patches. Each part is timed a few times, in
turn; what a run of 200 takes follows from how often it does each.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

from benchmarks.shared.pictures import picture
from msdg_vllm.calibration.checking import check
from msdg_vllm.calibration.loading import HuggingFaceTower
from msdg_vllm.calibration.looking import look
from msdg_vllm.calibration.masks import Annotation
from msdg_vllm.core.profiles import built_in_profile

_NUM_IMAGES, _WIDTH = 200, 5
_FLIPPED, _CHECKED, _CHECKED_WITH_MASKS = 20, 20, 40
_PROFILE = "clip-vit-large-patch14-336"


def make_tower() -> HuggingFaceTower:
    """CLIP-ViT-L/14 at 336 pixels, without its training."""
    config = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
    )
    size = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
    return HuggingFaceTower("random", config, CLIPVisionModel(config), CLIPImageProcessor(**size))


def made_up(num_tokens: int) -> Annotation:
    """Four things of two classes, a quarter of the image each."""
    things = np.arange(num_tokens) * 4 // num_tokens
    areas = (things == np.arange(4)[:, None]).astype(np.float32)
    return Annotation(areas, np.ones(num_tokens, np.float32), things % 2)


def in_turn(parts: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """The median seconds of each part; the processor's, for other work may be going on."""
    times: list[list[float]] = [[] for _ in parts]
    for _ in range(rounds):
        for part, own in zip(parts, times, strict=True):
            start = time.process_time()
            part()
            own.append(time.process_time() - start)
    return [median(own) for own in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tower = make_tower()
    image = picture(0)
    encoded = tower.encode(image)
    annotation = made_up(len(encoded.valid))
    profile, patches = built_in_profile(_PROFILE), tower.info.patches_per_token
    inputs = tower._inputs(image)
    parts: list[Callable[[], object]] = [
        lambda: tower._run(inputs),
        lambda: tower.encode(image),
        lambda: look(encoded, _WIDTH, patches, annotation),
        lambda: check(encoded, profile, tower.info, 1.0, _WIDTH, annotation, None),
    ]
    with torch.inference_mode():
        alone, encode, first, second = in_turn(parts, arguments.rounds)
    print(
        f"tower alone {alone:.2f} s, with what is around it {encode:.2f} s, first look "
        f"{first:.2f} s, second look {second:.2f} s"
    )
    every = _NUM_IMAGES * (encode + first)
    for name, more in (
        ("without masks", _FLIPPED * encode + _CHECKED * (encode + second)),
        ("with masks", _CHECKED_WITH_MASKS * (encode + second)),
    ):
        ratio = (every + more) / (_NUM_IMAGES * alone)
        print(f"{_NUM_IMAGES} images {name}: {ratio:.2f} times the tower alone")


if __name__ == "__main__":
    main()

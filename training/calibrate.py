"""Calibrate the encoder profile of a bundled model: `python -m training.calibrate`.

As the paper does, on training pictures: the sink layer is where the largest update exceeds the
median update most, among layers whose large updates do not lie on the foreground; the sink
coordinate is the one that stands out most in the state after it; the saliency window is the late
one whose most updated tokens cover most of the foreground.
"""

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.quality.drawing import draw_scene
from benchmarks.quality.inference import PROFILE, SceneModel, Seen, load_model
from benchmarks.quality.scenes import Scene, sample_scene
from msdg_vllm.core.profiles import EncoderProfile
from training.export import MODELS
from training.pool import patch_owners

_TOP = 0.3  # share of tokens ranked by update magnitude, as in the paper
_SINK_RATIO = 10.0  # the paper's diagnostic threshold of the max-to-median ratio
_SINK_RECALL = 0.6  # twice what chance gives: where more is covered, items are updated, not sinks
_AT_ONCE = 32
_TINY = 1e-6  # a layer that changes nothing has no peak


def foreground_recall(magnitude: Tensor, foreground: Tensor) -> float:
    """Mean share of foreground patches among the top 30 % by `magnitude`; both `(B, N)`."""
    num_top = round(_TOP * magnitude.shape[1])
    top = torch.zeros_like(foreground).scatter(1, magnitude.topk(num_top, dim=1).indices, True)
    covered = (top & foreground).sum(1) / foreground.sum(1)
    return float(covered.mean())


def encoder_states(model: SceneModel, scenes: list[Scene]) -> tuple[list[Tensor], Tensor]:
    """Return the state entering each layer, `(S, P, d)` each, and the foreground, `(S, N)`.

    Of scenes whose picture has the form that most have.
    """
    encoded: dict[tuple[int, int], list[tuple[Scene, Seen]]] = defaultdict(list)
    for first in tqdm(range(0, len(scenes), _AT_ONCE), desc="encoding"):
        part = scenes[first : first + _AT_ONCE]
        for scene, seen in zip(part, model.see([draw_scene(s) for s in part]), strict=True):
            encoded[seen.grid].append((scene, seen))
    form = max(encoded, key=lambda form: len(encoded[form]))
    alike = encoded[form]
    layers = zip(*(seen.states for _, seen in alike), strict=True)
    owners = np.stack([patch_owners(scene, *form) for scene, _ in alike])
    return [torch.stack(layer).float() for layer in layers], torch.from_numpy(owners >= 0)


def calibrate(
    states: list[Tensor], foreground: Tensor, width: int, output_layer: int
) -> EncoderProfile:
    """Return the profile.

    Args:
        states: The state entering each layer, and the last one's output, `(S, P, d)` each.
        foreground: Which tokens show items, `(S, N)`; P is a multiple of N.
        width: Updates in the saliency window.
        output_layer: The state the projector reads; states past it are never used.
    """
    last = len(states) - 2

    def magnitude(first: int, second: int) -> Tensor:
        """Of the update of each patch, as a mean over the patches of a token, `(S, N)`."""
        moved = (states[second] - states[first]).norm(dim=-1)
        tokens: Tensor = moved.unflatten(1, (foreground.shape[1], -1)).mean(-1)
        return tokens

    updates = [magnitude(n, n + 1) for n in range(last)]
    ratios = [float((u.amax(1) / u.median(1).values.clamp(min=_TINY)).mean()) for u in updates]
    recalls = [foreground_recall(update, foreground) for update in updates]
    # The last update would leave no state after it to look at.
    unlike = [r if c < _SINK_RECALL else 0.0 for r, c in zip(ratios, recalls, strict=True)]
    sink_layer = int(np.argmax(unlike[:-1]))
    after = states[sink_layer + 1].abs()
    coordinate = int((after.amax(1) / after.median(1).values).mean(0).argmax())
    # Without a peak there are no sinks, and the threshold lies above everything seen.
    activation = after[..., coordinate]
    if unlike[sink_layer] > _SINK_RATIO:
        threshold = float(activation.amax(1).mean() + activation.median(1).values.mean()) / 2
    else:
        threshold = 2 * float(activation.max())
    print(f"{'layer':>5} {'recall':>7} {'max/median':>10}")
    for layer, (recall, ratio) in enumerate(zip(recalls, ratios, strict=True)):
        print(f"{layer:>5} {recall:>7.3f} {ratio:>10.2f}")
    windows = {}
    for first in range(last - width + 1):
        moved = magnitude(first, first + width)
        windows[(first, first + width)] = foreground_recall(moved, foreground)
        print(
            f"window {first:>2} -> {first + width:>2}: recall {windows[first, first + width]:.3f}"
        )
    late = {window: recall for window, recall in windows.items() if window[0] >= last // 3}
    return EncoderProfile(
        direction_layers=(2, last),
        saliency_window=max(late, key=lambda window: (round(late[window], 3), window)),
        sink_layer=sink_layer,
        sink_coordinate=coordinate,
        sink_threshold=round(threshold, 3),
        output_layer=None if output_layer == last else output_layer,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=MODELS / "scenes-llava")
    parser.add_argument("--scenes", type=int, default=512, help="training pictures to look at")
    parser.add_argument("--width", type=int, default=3, help="updates in the saliency window")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    scenes = [sample_scene(number, "train") for number in range(arguments.scenes)]
    model = load_model(arguments.model)
    states, foreground = encoder_states(model, scenes)
    profile = calibrate(states, foreground, arguments.width, model.output_layer)
    profile.save(arguments.model / PROFILE)
    print(profile.to_json())


if __name__ == "__main__":
    main()

"""Choose tokens of random images on the GPU, by kernels, and on the CPU, by torch; compare.

python -m tests.device.kernels
"""

import sys
from itertools import islice

import torch

from msdg_vllm.core import analyze_image, kernels, select_tokens
from tests.unit.core.cases import Case, random_case

NUM_CASES = 200
# Rounding may decide where two tokens are closer than it: seldom.
LEAST_SHARE = 0.98


def kept(case: Case, device: str) -> list[int]:
    """What is kept of an image on a device."""
    states = {layer: state.to(device) for layer, state in case.states.items()}
    valid = None if case.valid is None else case.valid.to(device)
    signals = analyze_image(states, case.profile, case.patches_per_token, valid=valid)
    chosen = select_tokens(signals, case.visual.to(device), case.query.to(device), case.budget)
    indices: list[int] = chosen.tolist()
    return indices


def main() -> int:
    """Print how many images agree; 1 if too few, or if the kernels did not run."""
    cases = list(islice(map(random_case, range(10_000)), NUM_CASES))
    with kernels.recorded_launches() as launches:
        agree = sum(kept(case, "cuda") == kept(case, "cpu") for case in cases)
    print(f"{agree} of {NUM_CASES} images agree, {len(launches)} launches of kernels")
    return int(agree < LEAST_SHARE * NUM_CASES or not launches or not torch.cuda.is_available())


if __name__ == "__main__":
    sys.exit(main())

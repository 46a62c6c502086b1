"""Choose tokens of random images on the GPU, by kernels, and on the CPU, by torch; compare.

python -m tests.device.kernels
"""

import sys
from itertools import islice

import torch

from msdg_vllm.core import analyze_image, kernels, select_tokens
from msdg_vllm.methods import Encoder, Image, Signals, method_named
from tests.unit.core.cases import Case, make_profile, random_case

NUM_CASES = 200
GREEDY = ("divprune", "cdpruner", "cen_divprune", "cen_cdpruner")
# Tokens and budgets; beyond 1,024 programs wait for each other.
SIZES = ((576, 64), (1500, 100), (4096, 64))
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


def kept_greedily(method: str, num_tokens: int, budget: int, device: str) -> list[int]:
    """What a greedy method keeps of random tokens on a device."""
    generator = torch.Generator().manual_seed(num_tokens)
    visual, query = (torch.randn(n, 1024, generator=generator) for n in (num_tokens, 8))
    image = Image(Signals(), visual.to(device), Encoder(1, make_profile()), query=query.to(device))
    indices: list[int] = method_named(method).select(image, budget).indices.tolist()
    return indices


def main() -> int:
    """Print how many images agree; 1 if too few, or if the kernels did not run."""
    cases = list(islice(map(random_case, range(10_000)), NUM_CASES))
    with kernels.recorded_launches() as launches:
        agree = sum(kept(case, "cuda") == kept(case, "cpu") for case in cases)
    print(f"{agree} of {NUM_CASES} images agree, {len(launches)} launches of kernels")
    works = agree >= LEAST_SHARE * NUM_CASES and bool(launches) and torch.cuda.is_available()
    for method in GREEDY:
        for num_tokens, budget in SIZES:
            with kernels.recorded_launches() as launches:
                ours, theirs = (
                    kept_greedily(method, num_tokens, budget, device) for device in ("cuda", "cpu")
                )
            same = len(set(ours) & set(theirs))
            print(f"{method}: {same} of {budget} of {num_tokens} tokens agree")
            works &= same >= LEAST_SHARE * budget and bool(launches)
    return int(not works)


if __name__ == "__main__":
    sys.exit(main())

"""What the originals do where ours departs from them: in float32, without guards, as they are.

Only the steps that go wrong, written from the description of the released code.

    python -m tests.method_references.originals

prints how often they go wrong at the size of LLaVA-1.5: 576 tokens, of which 64 are kept.
"""

import torch
from torch import Tensor

from tests.method_references.choice import Array, Choice
from tests.method_references.components import prunesid_reference


def divprune_original(x: Tensor, budget: int) -> list[int]:
    """Max-min distance where a chosen token is held back by its distance of 0 to itself alone."""
    units = x / x.norm(dim=-1, keepdim=True)
    distance = 1 - units @ units.T
    nearest = distance.topk(2, dim=-1, largest=False).values[:, 1]
    chosen = [int(nearest.argmax())]
    while len(chosen) < budget:
        chosen.append(int(distance[chosen].amin(dim=0).argmax()))
    return chosen


def cdpruner_original(x: Tensor, relevance: Tensor, budget: int) -> tuple[list[int], Tensor]:
    """Greedy MAP without a floor under the pivot; the choice and the gains that are left."""
    units = x / x.norm(dim=-1, keepdim=True)
    relevance = (relevance - relevance.min() + 1e-6) / (relevance.max() - relevance.min())
    kernel = relevance[:, None] * (units @ units.T) * relevance
    gains = kernel.diagonal().clone()
    rows = torch.zeros(budget, len(x))
    chosen = []
    for step in range(budget):
        best = int(gains.argmax())
        chosen.append(best)
        row = (kernel[best] - rows[:step, best] @ rows[:step]) / gains[best].sqrt()
        rows[step] = row
        gains = gains - row.square()
        gains[best] = -torch.inf
    return chosen, gains


def prunesid_original(features: Array, attention: Array, budget: int) -> list[int]:
    """PruneSID with the components of `torch.pca_lowrank`, which draws random numbers."""

    def randomised(_: Choice, v: Array, q: int) -> tuple[list[int], list[float]]:
        samples = torch.from_numpy(v).float().sigmoid().T
        loadings = torch.pca_lowrank(samples, q=q)[2].abs()
        return loadings.argmax(dim=-1).tolist(), loadings.amax(dim=-1).tolist()

    return prunesid_reference(features, attention, budget, randomised).keep


def main() -> None:
    """Print what the originals do with images of one colour, of two, and of 30 clusters."""
    num_tokens, budget = 576, 64
    torch.manual_seed(0)
    colours = torch.randn(2, 4096)
    flat = colours[:1].expand(num_tokens, -1)
    relevance = torch.randn(num_tokens)
    for name, visual in (
        ("one colour", flat),
        ("one colour and noise of 0.1 %", flat + 1e-3 * torch.randn(num_tokens, 4096)),
        ("two colours", colours[torch.randint(2, (num_tokens,))]),
    ):
        distinct = len(set(divprune_original(visual, budget)))
        print(f"DivPrune, {name}: {distinct} distinct tokens of {budget}")
        chosen, gains = cdpruner_original(visual, relevance, budget)
        print(
            f"CDPruner, {name}: {len(set(chosen))} distinct tokens of {budget}, "
            f"{int(gains.isnan().sum())} of {num_tokens} gains are NaN"
        )
    features = torch.randn(30, 1024)[torch.randint(30, (num_tokens,))]
    features = (features + 0.3 * torch.randn(num_tokens, 1024)).double()
    attention = torch.rand(num_tokens).double()
    runs = [set(prunesid_original(features.numpy(), attention.numpy(), budget)) for _ in range(6)]
    changed = [len(runs[0] - run) for run in runs[1:]]
    print(f"PruneSID, 30 clusters: {changed} of {budget} tokens change from call to call")


if __name__ == "__main__":
    main()

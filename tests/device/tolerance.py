"""How far log-probabilities move when products are less exact: what tolerances are taken from.

    python -m tests.device.tolerance

A tiny LLaVA of Hugging Face's on this CPU, the same tokens of an image kept in all runs: in
float32; in float64, which shows what rounding does to float32; with the operands of attention, or
of all products, rounded as a GPU's TF32 units do; in bfloat16.
"""

import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tests.checkpoints import make_llava
from tests.engine.language_oracle import answer
from tests.engine.llava_oracle import LlavaOracle
from tests.pictures import SIZES, picture_of

QUESTION = "Is there a blue circle in the picture?"
NUM_SEEDS, BUDGETS = 4, (4, 20, 60)
ATTENTION = {"_scaled_dot_product_flash_attention_for_cpu", "bmm", "baddbmm"}
PRODUCTS = ATTENTION | {"mm", "addmm", "convolution"}


class RoundedToTF32(TorchDispatchMode):
    """Rounds the float32 operands of some operators to ten bits of mantissa."""

    def __init__(self, operators: set[str]) -> None:
        super().__init__()
        self.operators = operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.operators:
            args = tree_map(_rounded, args)
        return func(*args, **(kwargs or {}))


def _rounded(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return value
    bits = value.contiguous().view(torch.int32) + 0x1000  # half of the last bit that stays
    return (bits & ~0x1FFF).view(torch.float32)


@torch.no_grad()
def first_step(oracle: LlavaOracle, picture: Any, budget: int) -> dict[int, float]:
    """Log-probabilities of the first token; evenly spaced tokens of the image are kept."""
    model, tokenizer = oracle.model.model, oracle.processor.tokenizer
    pixels = oracle.processor.image_processor(picture, return_tensors="pt")["pixel_values"]
    states = model.vision_tower(pixels.to(oracle.model.dtype), output_hidden_states=True)
    visual = model.multi_modal_projector(states.hidden_states[-2][0, 1:])
    kept = torch.linspace(0, len(visual) - 1, budget).long()
    texts = [
        tokenizer.encode(text, add_special_tokens=False)
        for text in ("USER: ", f"\n{QUESTION} ASSISTANT:")
    ]
    found = answer(model.language_model, oracle.model.lm_head, texts, [visual[kept]], max_tokens=1)
    return found.logprobs[0]


def main() -> int:
    """Print the largest and the median difference of the five likeliest tokens."""
    with tempfile.TemporaryDirectory() as folder:
        oracle = LlavaOracle(make_llava(Path(folder)))
    cases = [
        (picture_of(kind, seed), budget)
        for kind in SIZES
        for seed in range(NUM_SEEDS)
        for budget in BUDGETS
    ]
    exact = [first_step(oracle, *case) for case in cases]
    runs: dict[str, tuple[torch.dtype, AbstractContextManager[object]]] = {
        "float64": (torch.float64, nullcontext()),
        "TF32 in attention": (torch.float32, RoundedToTF32(ATTENTION)),
        "TF32 in all products": (torch.float32, RoundedToTF32(PRODUCTS)),
        "bfloat16": (torch.bfloat16, nullcontext()),
    }
    for name, (dtype, mode) in runs.items():
        oracle.model.to(dtype)
        with mode:
            others = [first_step(oracle, *case) for case in cases]
        differences = [
            abs(one[token] - other[token])
            for one, other in zip(exact, others, strict=True)
            for token in sorted(one, key=one.__getitem__)[-5:]
        ]
        median = sorted(differences)[len(differences) // 2]
        print(f"{name}: {max(differences):.2g} at most, {median:.2g} in the median")
    return 0


if __name__ == "__main__":
    sys.exit(main())

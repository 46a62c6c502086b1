"""How many launches a method takes on a device, counted on tensors that have no data.

Counted are the operators of torch that start work on a device (views and allocations do not), the
copies to it, and our own kernels. No GPU is needed, and nothing is timed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from msdg_vllm.core import kernels, num_kept_tokens
from msdg_vllm.core.kernels import Launch
from msdg_vllm.core.profiles import built_in_profile
from msdg_vllm.core.stream import token_signals
from msdg_vllm.methods import (
    METHODS,
    Encoder,
    Image,
    Needs,
    Question,
    Signals,
    method_named,
)

RETENTION = 0.111
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# Operators that return their input under another shape, though their schema does not say so.
_RESHAPES = {"_unsafe_view", "_reshape_alias", "detach", "lift_fresh"}
_PRODUCTS = {"mm", "mv", "addmm", "addmv", "bmm", "baddbmm"}


@dataclass(frozen=True)
class Shape:
    """Images of one size that are encoded together, and how many different questions they get."""

    num_images: int
    num_tokens: int
    num_questions: int = 1
    profile: str = "clip-vit-large-patch14-336"
    width: int = 1024
    llm_width: int = 4096
    patches_per_token: int = 1
    num_query_tokens: int = 16

    def __str__(self) -> str:
        questions = f", {self.num_questions} questions" if self.num_questions > 1 else ""
        family = "CLIP-L" if self.patches_per_token == 1 else "Qwen2.5-VL"
        return f"{self.num_images} x {self.num_tokens} {family}{questions}"


# One image, the five tiles of LLaVA-NeXT, a full micro-batch, and Qwen's images: small and large.
SHAPES = (
    Shape(1, 576),
    Shape(5, 576),
    Shape(8, 576, num_questions=8),
    Shape(8, 1024, 8, "qwen2.5-vl", 1280, 3584, patches_per_token=4),
    Shape(1, 4096, 1, "qwen2.5-vl", 1280, 3584, patches_per_token=4),
)
MICRO_BATCH = SHAPES[2]


@dataclass(frozen=True)
class Operator:
    """One launch of an operator of torch: what it moves and computes."""

    name: str
    num_bytes: int
    num_flops: int


@dataclass
class Work:
    """What a call makes a device do."""

    operators: list[Operator] = field(default_factory=list)
    kernels: list[Launch] = field(default_factory=list)

    @property
    def num_launches(self) -> int:
        """Operators, copies and kernels."""
        return len(self.operators) + len(self.kernels)


class _Operators(TorchDispatchMode):
    """Notes the operators of torch that start work on a device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Operator] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        is_view = any(
            value.alias_info is not None and not value.alias_info.is_write
            for value in func._schema.returns
        )
        outputs = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        on_device = any(value.is_meta for value in outputs)
        if on_device and not is_view and name not in _ALLOCATIONS | _RESHAPES:
            inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
            # A result that is written in place is an input as well.
            tensors = {id(value): value for value in (*inputs, *outputs)}.values()
            flops = 2 * outputs[0].numel() * inputs[-2].shape[-1] if name in _PRODUCTS else 0
            self.seen.append(Operator(name, sum(value.nbytes for value in tensors), flops))
        return result


@contextmanager
def _counted() -> Iterator[Work]:
    """Collect what the calls inside the block make a device do."""
    work = Work()
    devices, kernels.DEVICES = kernels.DEVICES, {"meta"}
    try:
        with kernels.recorded_launches() as launches, _Operators() as operators:
            yield work
        work.operators, work.kernels = operators.seen, launches
    finally:
        kernels.DEVICES = devices


@torch.no_grad()
def count(method_name: str, shape: Shape) -> tuple[Work, Work]:
    """Return what the two halves of a method make a device do: analysis, selection.

    Raises an error for a method that waits for the device: it reads what is not there.
    """
    method = method_named(method_name)
    images = _images(shape)
    encoder = images[0].encoder
    num_patches = shape.num_tokens * shape.patches_per_token
    states = {
        layer: torch.empty(
            shape.num_images, num_patches, shape.width, dtype=torch.bfloat16, device="meta"
        )
        for layer in method.needs(encoder).token_signals
    }
    budget = num_kept_tokens(shape.num_tokens, RETENTION)
    queries = [
        torch.empty(
            shape.num_query_tokens + number, shape.llm_width, dtype=torch.bfloat16, device="meta"
        )
        for number in range(shape.num_questions)
    ]
    # Other questions come with other budgets.
    questions = [
        Question(budget + row % shape.num_questions, queries[row % shape.num_questions])
        for row in range(shape.num_images)
    ]
    with _counted() as analysis:
        if states:
            # As the engine does, for all images while the encoder runs.
            signals = token_signals(states, encoder.measured, shape.patches_per_token)
            images = [
                replace(
                    image,
                    signals=replace(image.signals, token_signals=signals.map(itemgetter(row))),
                )
                for row, image in enumerate(images)
            ]
        analyses = method.analyze(images)
    with _counted() as selection:
        method.select_all(analyses, questions)
    return analysis, selection


def recorded(method_name: str, shape: Shape) -> Work:
    """Return what both halves make a device do."""
    halves = count(method_name, shape)
    return Work(
        [operator for half in halves for operator in half.operators],
        [launch for half in halves for launch in half.kernels],
    )


def _images(shape: Shape) -> Sequence[Image]:
    """Images with every signal that a method reads, and no data."""
    is_clip = shape.patches_per_token == 1
    encoder = Encoder(
        num_layers=23 if is_clip else 32,
        profile=built_in_profile(shape.profile),
        has_class_token=is_clip,
        global_layers=None if is_clip else (7, 15, 23, 31),
        patches_per_token=shape.patches_per_token,
    )
    needs = Needs()
    for name in METHODS:
        needs = needs | method_named(name).needs(encoder)
    num_patches = shape.num_tokens * shape.patches_per_token

    def values(*sizes: int) -> Tensor:
        return torch.empty(num_patches, *sizes, dtype=torch.bfloat16, device="meta")

    def floats(*sizes: int) -> Tensor:
        return torch.empty(num_patches, *sizes, device="meta")

    side = int(shape.num_tokens**0.5)
    assert side * side == shape.num_tokens
    return [
        Image(
            signals=Signals(
                states={n: values(shape.width) for n in needs.states},
                features=values(shape.width),
                class_attention={n: floats() for n in needs.class_attention},
                received_attention={n: floats() for n in needs.received_attention},
                keys={n: floats(64) for n in needs.keys},
                mlp_updates={n: floats() for n in needs.mlp_updates},
            ),
            visual=torch.empty(
                shape.num_tokens, shape.llm_width, dtype=torch.bfloat16, device="meta"
            ),
            encoder=encoder,
            grids=((side, side),),
            seed=seed,
        )
        for seed in range(shape.num_images)
    ]

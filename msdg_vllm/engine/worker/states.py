"""Capture of the few encoder states the method reads, while the encoder runs as it always does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

EncoderStates = dict[int, torch.Tensor]
"""States by the layer they enter: key `l` holds h^l, Hugging Face's `hidden_states[l]`."""


@contextmanager
def capture_states(
    blocks: Sequence[nn.Module], layers: Sequence[int], *, copy: bool = False
) -> Iterator[EncoderStates]:
    """Fill the yielded dict with the states that enter `layers` while the encoder runs inside.

    The encoder's `len(blocks)`-th state is the output of its last block. Only the named states
    are held; they live as long as the dict does.

    Args:
        blocks: The encoder's blocks, in order.
        layers: Which states to capture.
        copy: Copy each state, for encoders whose kernels write to their input.
    """
    states: EncoderStates = {}
    wrapped: list[nn.Module] = []

    def keep(layer: int, state: torch.Tensor) -> None:
        states[layer] = state.clone() if copy else state

    def wrap(block: nn.Module, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward_and_keep(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if index in layers:
                keep(index, hidden)
            output = forward(hidden, *args, **kwargs)
            if index + 1 == len(blocks) and len(blocks) in layers:
                keep(len(blocks), output)
            return output

        return forward_and_keep

    # Wrapping `forward` on the instance also reaches blocks whose class is compiled, on which
    # module hooks do not fire.
    for index, block in enumerate(blocks):
        if index in layers or (index + 1 == len(blocks) and len(blocks) in layers):
            block.__dict__["forward"] = wrap(block, index, block.forward)
            wrapped.append(block)
    try:
        yield states
    finally:
        for block in wrapped:
            del block.__dict__["forward"]

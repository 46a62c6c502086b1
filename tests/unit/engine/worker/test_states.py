"""Capture sees the named states, and leaves the encoder as it found it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from msdg_vllm.engine.worker.states import capture_states


class Block(nn.Module):
    def __init__(self, amount: float) -> None:
        super().__init__()
        self.amount = amount

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.amount


def run(blocks: nn.ModuleList, hidden: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        hidden = block(hidden)
    return hidden


def test_state_is_what_enters_a_layer_and_the_last_is_the_output() -> None:
    blocks = nn.ModuleList(Block(10.0**power) for power in range(4))
    with capture_states(blocks, (0, 2, 4)) as states:
        output = run(blocks, torch.zeros(1))
    assert {layer: state.item() for layer, state in states.items()} == {0: 0, 2: 11, 4: 1111}
    assert output.item() == 1111


def test_blocks_are_themselves_again_even_after_an_error() -> None:
    blocks = nn.ModuleList([Block(1.0), Block(2.0)])
    with pytest.raises(RuntimeError, match="broken"), capture_states(blocks, (0, 1, 2)):
        raise RuntimeError("broken")
    assert all("forward" not in vars(block) for block in blocks)
    assert run(blocks, torch.zeros(1)).item() == 3


def test_copied_states_survive_a_block_that_writes_to_its_input() -> None:
    class InPlace(Block):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden.add_(self.amount)

    blocks = nn.ModuleList([InPlace(1.0), InPlace(2.0)])
    with capture_states(blocks, (0, 1, 2), copy=True) as states:
        run(blocks, torch.zeros(1))
    assert [states[layer].item() for layer in range(3)] == [0, 1, 3]

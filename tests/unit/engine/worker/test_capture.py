"""Captured states are the named ones; signals equal what whole attention maps say.

The encoder is left as it was found.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from msdg_vllm.core.stream import TokenStream, token_signals
from msdg_vllm.engine.worker import attention
from msdg_vllm.engine.worker.capture import capture_signals
from msdg_vllm.methods import Encoder, Needs, method_named
from tests.unit.core.cases import make_profile

HEADS, WIDTH = 3, 4
NUM_TOKENS = 11


class FusedAttention(nn.Module):
    """Gives no weights away, as vLLM's encoder attention."""

    num_heads = HEADS
    scale = WIDTH**-0.5

    def forward(self, query: Any, key: Any, value: Any, **_: Any) -> Any:
        heads = (x.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    tp_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self.attn = FusedAttention()

    def forward(self, hidden: torch.Tensor) -> Any:
        query, key, value = self.projection(hidden).chunk(3, dim=-1)
        return self.attn(query, key, value=value)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.mlp = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(hidden)
        return hidden + self.mlp(hidden)


@pytest.fixture
def blocks() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(3))


def run(blocks: nn.ModuleList, hidden: torch.Tensor) -> list[torch.Tensor]:
    states = [hidden]
    for block in blocks:
        states.append(block(states[-1]))
    return states


def whole_map(block: Any, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention weights of every head, `(R, heads, T, T)`, and keys, `(R, T, heads, width)`."""
    query, key, _ = block.attention.projection(state).chunk(3, dim=-1)
    query, key = (x.unflatten(-1, (HEADS, WIDTH)) for x in (query, key))
    products = torch.einsum("rqhc,rkhc->rhqk", query, key) / WIDTH**0.5
    return products.softmax(dim=-1), key


@torch.no_grad()
def test_every_signal_equals_the_whole_map(blocks: nn.ModuleList) -> None:
    hidden = torch.randn(2, NUM_TOKENS, HEADS * WIDTH)
    needs = Needs(
        states=(1, 3), class_attention=(2,), received_attention=(0, 2), keys=(1,), mlp_updates=(1,)
    )
    with capture_signals(blocks, needs, lambda block: block.attention) as signals:
        run(blocks, hidden)
    states = run(blocks, hidden)
    assert signals.states.keys() == {1, 3}
    assert torch.equal(signals.states[3], states[3])
    weights, _ = whole_map(blocks[2], states[2])
    torch.testing.assert_close(signals.class_attention[2], weights.mean(dim=1)[:, 0])
    assert signals.received_attention.keys() == {0, 2}
    for layer, received in signals.received_attention.items():
        weights, _ = whole_map(blocks[layer], states[layer])
        torch.testing.assert_close(received, weights.mean(dim=1).sum(dim=1))
    _, key = whole_map(blocks[1], states[1])
    torch.testing.assert_close(signals.keys[1], key.mean(dim=2))
    block: Any = blocks[1]
    attended = states[1] + block.attention(states[1])
    torch.testing.assert_close(signals.mlp_updates[1], block.mlp(attended).norm(dim=-1))


@torch.no_grad()
def test_attention_is_received_within_a_span_only(blocks: nn.ModuleList) -> None:
    hidden = torch.randn(1, NUM_TOKENS, HEADS * WIDTH)
    spans = [(0, 4), (4, NUM_TOKENS)]
    with capture_signals(
        blocks, Needs(received_attention=(0,)), lambda block: block.attention, spans=spans
    ) as signals:
        run(blocks, hidden)
    for start, stop in spans:
        weights, _ = whole_map(blocks[0], hidden[:, start:stop])
        expected = weights.mean(dim=1).sum(dim=1)
        torch.testing.assert_close(signals.received_attention[0][:, start:stop], expected)


def test_small_tiles_of_the_map_give_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = torch.randn(2, 1, 50, HEADS, WIDTH)
    whole = attention.received_attention(query, key, 0.5, [(0, 50)])
    monkeypatch.setitem(attention._TILE_BYTES, "cpu", 4 * HEADS * 50 * 7)
    torch.testing.assert_close(attention.received_attention(query, key, 0.5, [(0, 50)]), whole)


def test_heads_of_other_ranks_are_added_up(
    blocks: nn.ModuleList, monkeypatch: pytest.MonkeyPatch
) -> None:
    for block in blocks:
        block.attention.tp_size = 2  # type: ignore[union-attr]
    monkeypatch.setattr(attention, "tensor_model_parallel_all_reduce", lambda values: 2 * values)
    hidden = torch.randn(1, NUM_TOKENS, HEADS * WIDTH)
    needs = Needs(class_attention=(0,), received_attention=(0,), keys=(0,))
    with capture_signals(blocks, needs, lambda block: block.attention) as signals:
        run(blocks, hidden)
    weights, key = whole_map(blocks[0], hidden)
    torch.testing.assert_close(signals.class_attention[0], weights.mean(dim=1)[:, 0])
    torch.testing.assert_close(signals.received_attention[0], weights.mean(dim=1).sum(dim=1))
    torch.testing.assert_close(signals.keys[0], key.mean(dim=2))


def test_the_encoder_runs_as_without_capture_and_is_left_as_it_was(blocks: nn.ModuleList) -> None:
    hidden = torch.randn(1, NUM_TOKENS, HEADS * WIDTH)
    needs = Needs(states=(0,), class_attention=(1,), mlp_updates=(2,))
    with capture_signals(blocks, needs, lambda block: block.attention):
        captured = run(blocks, hidden)
    assert all("forward" not in vars(module) for module in blocks.modules())
    assert torch.equal(captured[-1], run(blocks, hidden)[-1])


class AddingBlock(nn.Module):
    def __init__(self, amount: float) -> None:
        super().__init__()
        self.amount = amount

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.amount


def capture_states(blocks: nn.ModuleList, layers: tuple[int, ...], *, copy: bool = False) -> Any:
    return capture_signals(blocks, Needs(states=layers), lambda block: None, copy=copy)


def run_adding(blocks: nn.ModuleList, hidden: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        hidden = block(hidden)
    return hidden


def test_state_is_what_enters_a_layer_and_the_last_is_the_output() -> None:
    blocks = nn.ModuleList(AddingBlock(10.0**power) for power in range(4))
    with capture_states(blocks, (0, 2, 4)) as signals:
        output = run_adding(blocks, torch.zeros(1))
    states = {layer: state.item() for layer, state in signals.states.items()}
    assert states == {0: 0, 2: 11, 4: 1111}
    assert output.item() == 1111


def test_a_block_may_give_more_than_its_state() -> None:
    class WithWeights(AddingBlock):
        def forward(self, hidden: torch.Tensor) -> Any:
            return hidden + self.amount, None

    blocks = nn.ModuleList([WithWeights(1.0), WithWeights(2.0)])
    with capture_states(blocks, (1, 2)) as signals:
        hidden = torch.zeros(1)
        for block in blocks:
            hidden, _ = block(hidden)
    assert [signals.states[layer].item() for layer in (1, 2)] == [1, 3]


def test_blocks_are_themselves_again_even_after_an_error() -> None:
    blocks = nn.ModuleList([AddingBlock(1.0), AddingBlock(2.0)])
    with pytest.raises(RuntimeError, match="broken"), capture_states(blocks, (0, 1, 2)):
        raise RuntimeError("broken")
    assert all("forward" not in vars(block) for block in blocks)
    assert run_adding(blocks, torch.zeros(1)).item() == 3


def test_copied_states_survive_a_block_that_writes_to_its_input() -> None:
    class InPlace(AddingBlock):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden.add_(self.amount)

    blocks = nn.ModuleList([InPlace(1.0), InPlace(2.0)])
    with capture_states(blocks, (0, 1, 2), copy=True) as signals:
        run_adding(blocks, torch.zeros(1))
    assert [signals.states[layer].item() for layer in range(3)] == [0, 1, 3]


@pytest.mark.parametrize("method", ["msdg", "evocut"])
def test_states_are_read_on_the_way_and_held_only_for_methods_that_want_them(method: str) -> None:
    blocks = nn.ModuleList(AddingBlock(float(power)) for power in range(5))
    encoder = Encoder(num_layers=5, profile=make_profile(num_groups=3, sink_coordinate=1))
    needs = method_named(method).needs(encoder) | method_named("msdg").needs(encoder)
    hidden = torch.randn(2, 1 + NUM_TOKENS, 6)
    stream = TokenStream(encoder.measured)
    with capture_signals(
        blocks, needs, lambda block: None, stream=stream, rows_of=lambda state: state[:, 1:]
    ) as signals:
        run_adding(blocks, hidden)
    assert set(signals.states) == (set() if method == "msdg" else set(range(6)))
    states = {0: hidden}
    for layer, block in enumerate(blocks):
        states[layer + 1] = block(states[layer])
    expected = token_signals({n: s[:, 1:] for n, s in states.items()}, encoder.measured)
    assert torch.equal(stream.finish().saliency, expected.saliency)
    with capture_signals(blocks, needs, lambda block: None) as unstreamed:
        run_adding(blocks, hidden)
    assert set(unstreamed.states) >= set(encoder.measured.layers)

"""Capture of what the methods of a batch read, while the encoder runs as it always does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from msdg_vllm.core.signals import full_precision
from msdg_vllm.core.stream import TokenStream
from msdg_vllm.engine.worker.attention import (
    Spans,
    class_attention,
    over_all_ranks,
    received_attention,
)
from msdg_vllm.methods import Needs, Signals


@contextmanager
def watched_states(
    blocks: Sequence[nn.Module], layers: Sequence[int], see: Callable[[int, torch.Tensor], None]
) -> Iterator[None]:
    """Show the states that enter `layers`, one after the other, while the encoder runs inside.

    A state goes by the layer it enters: `l` is h^l, Hugging Face's `hidden_states[l]`. That of
    `len(blocks)` is the output of the last block. It is shown before a block can write to it.
    """

    def wrap(index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def see_and_forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if index in layers:
                see(index, hidden)
            output = forward(hidden, *args, **kwargs)
            if index + 1 == len(blocks) and len(blocks) in layers:
                # SigLIP's blocks give their attention weights too, which are none.
                see(len(blocks), output[0] if isinstance(output, tuple) else output)
            return output

        return see_and_forward

    with ExitStack() as taps:
        for index in {min(layer, len(blocks) - 1) for layer in layers}:
            forward = wrap(index, blocks[index].forward)
            taps.enter_context(replaced_forward(blocks[index], forward))
        yield


@contextmanager
def capture_signals(
    blocks: Sequence[nn.Module],
    needs: Needs,
    attention_of: Callable[[Any], Any],
    *,
    stream: TokenStream | None = None,
    rows_of: Callable[[torch.Tensor], torch.Tensor] = lambda state: state,
    spans: Spans | None = None,
    copy: bool = False,
    scale_of: Callable[[Any], torch.Tensor] | None = None,
) -> Iterator[Signals]:
    """Fill the yielded signals while the encoder runs inside.

    Rows and tokens are the encoder's own: the class token is among them, windows are not undone,
    features and the signals of tokens are missing, and received attention is a sum over queries,
    not yet a mean.

    Args:
        blocks: The encoder's blocks, in order; each has an `mlp`.
        needs: What to capture.
        attention_of: The module of a block that hands queries and keys to a fused `attn`.
        stream: What reduces states to the signals of tokens, if the needs name any; without one
            those states are held.
        rows_of: Makes `(R, P, d)` for the stream of a state: a view that leaves out what is no
            patch.
        spans: Which tokens of a row see each other in layers with global attention; None: all.
        copy: Copy states, for encoders whose kernels write to their input.
        scale_of: What a block multiplies the output of its MLP by, if it does.
    """
    states: dict[int, torch.Tensor] = {}
    held = needs.states if stream is not None else (*needs.states, *needs.token_signals)
    streamed = stream.layers if stream is not None else ()
    rows: dict[int, torch.Tensor] = {}
    columns: dict[int, torch.Tensor] = {}
    keys: dict[int, torch.Tensor] = {}
    updates: dict[int, torch.Tensor] = {}

    def read_state(layer: int, state: torch.Tensor) -> None:
        if layer in held:
            states[layer] = state.clone() if copy else state
        if stream is not None and layer in streamed:
            stream.take(layer, rows_of(state))

    def read_attention(layer: int, query: torch.Tensor, key: torch.Tensor) -> None:
        module = attention_of(blocks[layer])
        heads, scale, ranks = module.attn.num_heads, module.attn.scale, module.tp_size
        # Some encoders pass (R, T, heads * width), others (R, T, heads, width).
        query, key = (x.unflatten(-1, (heads, -1)) if x.dim() == 3 else x for x in (query, key))
        if layer in needs.class_attention:
            row = class_attention(query, key, scale)
            rows[layer] = over_all_ranks(row, ranks) / (heads * ranks)
        if layer in needs.received_attention:
            column = received_attention(query, key, scale, spans or [(0, query.shape[1])])
            columns[layer] = over_all_ranks(column, ranks) / (heads * ranks)
        if layer in needs.keys:
            keys[layer] = over_all_ranks(key.float().sum(dim=2), ranks) / (heads * ranks)

    def tap_attention(layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def read_and_attend(
            query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            with full_precision(query.device):
                read_attention(layer, query, key)
            return forward(query, key, *args, **kwargs)

        return read_and_attend

    def tap_mlp(layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def compute_and_read(*args: Any, **kwargs: Any) -> Any:
            update = forward(*args, **kwargs)
            added = update if scale_of is None else update * scale_of(blocks[layer])
            updates[layer] = torch.linalg.vector_norm(added.float(), dim=-1)
            return update

        return compute_and_read

    with ExitStack() as taps:
        taps.enter_context(watched_states(blocks, (*held, *streamed), read_state))
        for layer in needs.attention_layers:
            attention = attention_of(blocks[layer]).attn
            tap = tap_attention(layer, attention.forward)
            taps.enter_context(replaced_forward(attention, tap))
        for layer in needs.mlp_updates:
            mlp: Any = blocks[layer].mlp
            taps.enter_context(replaced_forward(mlp, tap_mlp(layer, mlp.forward)))
        yield Signals(
            states=states,
            class_attention=rows,
            received_attention=columns,
            keys=keys,
            mlp_updates=updates,
        )


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Put another function in the place of the `forward` of one module instance.

    That also reaches modules whose class is compiled, on which hooks do not fire.
    """
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]

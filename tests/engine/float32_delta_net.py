"""A gated delta net in float32 for vLLM on the CPU, so that hybrid models can be held to 1e-4.

vLLM's own asserts bfloat16. This one computes token by token, with torch, on the same caches of
states. Importing it in a worker puts it in the place of vLLM's: name `Extension` as the
`worker_extension_cls` of an engine.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
import vllm.model_executor.layers.mamba.ops.cpu.gdn_attention as stock
from vllm.forward_context import get_forward_context


class Extension:
    """Adds nothing to a worker: importing its module is enough."""


def delta_net_core(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: Any,
) -> None:
    """The stock operation with the same arguments, results and side effects."""
    context: Any = get_forward_context()
    layer: Any = context.no_compile_layers[stock._resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return
    metadata: Any = context.attn_metadata[layer.prefix]
    if metadata.num_actual_tokens == 0:
        return
    assert metadata.spec_sequence_masks is None
    starts = metadata.non_spec_query_start_loc.tolist()
    slots = metadata.non_spec_state_indices_tensor.tolist()
    has_state = metadata.has_initial_state
    conv_states, states = layer.kv_cache[0], layer.kv_cache[1]
    if not stock.is_conv_state_dim_first():
        conv_states = conv_states.transpose(-1, -2)  # (slots, channels, width - 1)
    states = states.view(states.shape[0], states.shape[1], states.shape[3], states.shape[2])
    for row in range(metadata.num_decodes + metadata.num_prefills):
        here, slot = slice(starts[row], starts[row + 1]), slots[row]
        is_new = row >= metadata.num_decodes and not bool(has_state[row])
        convolved = _convolve(layer, mixed_qkv[here], conv_states[slot], is_new)
        query, key, value = (part[0] for part in layer.rearrange_mixed_qkv(convolved))
        core_attn_out[here] = _recur(
            layer, query, key, value, b[here].float(), a[here].float(), states[slot], is_new
        ).to(core_attn_out.dtype)


def _convolve(layer: Any, rows: torch.Tensor, state: torch.Tensor, is_new: bool) -> torch.Tensor:
    """Causal convolution over a request's new tokens and the last few before them."""
    weight = stock._unpacked_conv_weight(layer).float()
    past = torch.zeros_like(state) if is_new else state.clone()
    signal = torch.cat([past.float(), rows.float().T], dim=1)  # (channels, width - 1 + T)
    state.copy_(signal[:, signal.shape[1] - state.shape[1] :])
    bias = None if layer.conv1d.bias is None else layer.conv1d.bias.float()
    result = F.conv1d(signal[None], weight[:, None], bias, groups=len(signal))[0]
    return F.silu(result.T)


def _recur(
    layer: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    state: torch.Tensor,
    is_new: bool,
) -> torch.Tensor:
    """The delta rule, one token after the other; `(T, heads, width)` in and out."""
    repeats = value.shape[1] // key.shape[1]
    query, key = (
        (rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + 1e-6)).repeat_interleave(
            repeats, dim=1
        )
        for rows in (query, key)
    )
    query = query * query.shape[-1] ** -0.5
    beta = b.sigmoid()
    decay = (-layer.A_log.float().exp() * F.softplus(a + layer.dt_bias.float())).exp()
    memory = torch.zeros_like(state).float() if is_new else state.float()  # (heads, dk, dv)
    outputs = []
    for token in range(len(value)):
        memory = memory * decay[token][:, None, None]
        recalled = torch.einsum("hk,hkv->hv", key[token], memory)
        update = (value[token] - recalled) * beta[token][:, None]
        memory = memory + key[token][:, :, None] * update[:, None, :]
        outputs.append(torch.einsum("hk,hkv->hv", query[token], memory))
    state.copy_(memory)
    return torch.stack(outputs)


# The operation is registered from the module's attribute, with the types of its arguments.
delta_net_core.__annotations__ = inspect.get_annotations(
    stock.cpu_gdn_attention_core, eval_str=True
)
delta_net_core.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    stock.cpu_gdn_attention_core, eval_str=True
)
stock.cpu_gdn_attention_core = delta_net_core

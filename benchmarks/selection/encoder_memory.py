"""How much memory pruning adds to an encoder's run, counted on tensors that have no data.

For every family in its real shape, in bfloat16: the most bytes alive at once with and without
capture and analysis, the encoder standing in by one new state per layer. Twice: states reduced as
they come, and all of them held until the end. Memory profiling takes what is added from the KV
cache, so the last column says how many blocks more there are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter

import torch
from torch import Tensor, nn

from benchmarks.selection.peak_memory import PeakMemory
from msdg_vllm.core import kernels
from msdg_vllm.core.profiles import EncoderProfile, built_in_profile
from msdg_vllm.core.stream import TokenStream
from msdg_vllm.methods import Encoder, Image, Signals, method_named

CLIP = built_in_profile("clip-vit-large-patch14-336")
QWEN = built_in_profile("qwen2.5-vl")


@dataclass(frozen=True)
class Case:
    """One image, or one video, of a family in its usual shape.

    Attributes:
        family: What it is.
        tiles: Rows of the encoder.
        tokens: Visual tokens of a row.
        patches: How many patches merge into one.
        width: Of a state.
        layers: Of the encoder.
        kv_bytes: Bytes of keys and values of one token in the usual language model.
        is_shuffled: Whether the encoder has patches in another order than tokens.
        copies: Whether states that are held are copied.
        has_class_token: Whether a row has one more.
    """

    family: str
    tiles: int
    tokens: int
    patches: int
    width: int
    layers: int
    kv_bytes: int
    is_shuffled: bool = False
    copies: bool = False
    has_class_token: bool = False

    @property
    def profile(self) -> EncoderProfile:
        """The family's own, or one that reads states at the same depths."""
        if self.layers == 23:
            return CLIP
        scale = (self.layers - 1) / 31
        deep = [round(n * scale) for n in (*QWEN.saliency_window, 17)]  # type: ignore[misc]
        return replace(
            QWEN,
            direction_layers=(2, self.layers - 1),
            saliency_window=(deep[0], deep[1]),
            sink_layer=deep[2],
            output_layer=self.layers,
        )

    @property
    def state_bytes(self) -> int:
        """Of one state in bfloat16."""
        return self.tiles * self.tokens * self.patches * self.width * 2


def _kv(layers: int, heads: int, width: int = 128) -> int:
    return 2 * layers * heads * width * 2


CASES = (
    Case("LLaVA-1.5-7B", 1, 576, 1, 1024, 23, _kv(32, 32), has_class_token=True),
    Case("LLaVA-NeXT-7B, 5 tiles", 5, 576, 1, 1024, 23, _kv(32, 32), has_class_token=True),
    Case("Mini-Gemini-7B-HD, 5 tiles", 5, 576, 1, 1024, 23, _kv(32, 32), has_class_token=True),
    Case("InternVL3-8B, 13 tiles", 13, 256, 4, 1024, 24, _kv(28, 4), True, has_class_token=True),
    Case("Qwen2-VL-7B", 1, 16384, 4, 1280, 32, _kv(28, 4), copies=True),
    Case("Qwen2.5-VL-7B", 1, 1024, 4, 1280, 32, _kv(28, 4), True, copies=True),
    Case("Qwen2.5-VL-7B", 1, 16384, 4, 1280, 32, _kv(28, 4), True, copies=True),
    Case("Qwen3-VL-8B", 1, 16384, 4, 1152, 27, _kv(36, 8), copies=True),
    Case("GLM-4.1V-9B", 1, 6144, 4, 1536, 24, _kv(40, 2), copies=True),
)


class _Block(nn.Module):
    """Puts out a new state."""

    def forward(self, state: Tensor) -> Tensor:
        return state * 1


def added_bytes(case: Case, *, by_stream: bool, by_kernels: bool = True) -> int:
    """Return by how much capture and analysis raise the peak of an encoder's run."""
    with _on_device(by_kernels), torch.inference_mode():
        with PeakMemory() as alone:
            _run(case, None)
        with PeakMemory() as together:
            _run(case, by_stream)
    added: int = together.peak - alone.peak
    return added


@contextmanager
def _on_device(by_kernels: bool) -> Iterator[None]:
    devices, kernels.DEVICES = kernels.DEVICES, {"meta"} if by_kernels else set()
    try:
        yield
    finally:
        kernels.DEVICES = devices


def _run(case: Case, by_stream: bool | None) -> None:
    """Encode, capture and analyse; None only encodes."""
    from msdg_vllm.engine.worker.capture import capture_signals  # loads vLLM

    blocks = [_Block() for _ in range(case.layers)]
    num_patches = case.tokens * case.patches
    num_rows = num_patches + case.has_class_token
    state = torch.empty(case.tiles, num_rows, case.width, dtype=torch.bfloat16, device="meta")
    if by_stream is None:
        for block in blocks:
            state = block(state)
        return
    encoder = Encoder(case.layers, case.profile, patches_per_token=case.patches)
    method = method_named("msdg")
    order = torch.empty(num_patches, dtype=torch.int64, device="meta") if case.is_shuffled else None
    stream = None
    if by_stream:
        stream = TokenStream(case.profile, case.patches, order=order, copies=case.copies)
    with capture_signals(
        blocks,
        method.needs(encoder),
        lambda block: None,
        stream=stream,
        rows_of=lambda state: state[:, -num_patches:],
        copy=case.copies,
    ) as captured:
        for block in blocks:
            state = block(state)

    def in_order(tensor: Tensor) -> Tensor:
        patches = tensor[:, -num_patches:]
        return patches if order is None else patches[:, order]

    signals = Signals(token_signals=stream.finish()) if stream else captured.map(in_order)
    visual = torch.empty(case.tokens, 1, device="meta")
    method.analyze(
        [Image(signals.map(itemgetter(row)), visual, encoder) for row in range(case.tiles)]
    )


def memory_table() -> str:
    """All families as a Markdown table."""
    rows = [
        "| family | tokens | state | all states held: per token | in states "
        "| reduced as they come: per token | in states | without kernels, in states "
        "| KV blocks of 16 gained |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        held = added_bytes(case, by_stream=False)
        streamed = added_bytes(case, by_stream=True)
        in_torch = added_bytes(case, by_stream=True, by_kernels=False)
        tokens = case.tiles * case.tokens
        rows.append(
            f"| {case.family} | {tokens:,} | {case.state_bytes / 2**20:.1f} MiB "
            f"| {held / tokens / 1024:.1f} KiB | {held / case.state_bytes:.1f} "
            f"| {streamed / tokens / 1024:.1f} KiB | {streamed / case.state_bytes:.1f} "
            f"| {in_torch / case.state_bytes:.1f} | {(held - streamed) // (16 * case.kv_bytes):,} |"
        )
    return "\n".join(rows)

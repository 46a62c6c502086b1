"""States that are reduced on the way give the same bits as states that are all at hand."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from operator import itemgetter

import pytest
import torch
from torch import Tensor

from benchmarks.selection.peak_memory import PeakMemory
from msdg_vllm.core import ImageSignals, SelectionOptions, analyze_image
from msdg_vllm.core.analysis import analyze_tokens
from msdg_vllm.core.kernels import stacked
from msdg_vllm.core.profiles import EncoderProfile, built_in_profile
from msdg_vllm.core.stream import TokenStream
from tests.unit.core.cases import make_profile

PROFILE = make_profile(num_groups=6, sink_coordinate=1)
PATCHES = 4


def streamed(
    states: Iterator[tuple[int, Tensor]], stream: TokenStream, profile: EncoderProfile
) -> ImageSignals:
    for layer, state in states:
        if layer in stream.layers:
            stream.take(layer, state)
    tokens = stream.finish()
    images = [tokens.map(itemgetter(row)) for row in range(len(tokens.moved))]
    return analyze_tokens(images, profile)


def assert_same(ours: ImageSignals, expected: ImageSignals) -> None:
    for name in ("saliency", "groups", "num_groups", "sink_mask", "sink_activation"):
        assert torch.equal(getattr(ours, name), getattr(expected, name)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "profile",
    [
        PROFILE,
        replace(PROFILE, direction_layers=(0, 3)),  # ends before the window does
        replace(PROFILE, saliency_window=None, sink_layer=None, sink_coordinate=None),
        replace(PROFILE, grouping="output", output_layer=5, saliency_scale=0.3),
    ],
    ids=["usual", "late window", "directions alone", "output"],
)
def test_an_encoder_that_overwrites_its_states_in_another_order_changes_no_bit(
    dtype: torch.dtype, profile: EncoderProfile
) -> None:
    generator = torch.Generator().manual_seed(0)
    states = {n: torch.randn(2, 1200, 40, generator=generator).to(dtype) for n in range(6)}
    states[3][0, 5, 1] = 90.0
    states[3][1, 7, 2] = torch.nan
    order = torch.randperm(1200, generator=generator)
    buffer = torch.empty_like(states[0])

    def running() -> Iterator[tuple[int, Tensor]]:
        for layer, state in states.items():
            buffer[:, order] = state
            yield layer, buffer

    stream = TokenStream(profile, PATCHES, order=order, copies=True)
    assert_same(streamed(running(), stream, profile), analyze_image(states, profile, PATCHES))


@pytest.mark.parametrize(
    ("grouping", "saliency", "sink_filter"),
    [*product(("profile", "none"), ("endpoint", "accumulated"), (True, False))],
)
def test_variants_are_streamed_too(grouping: str, saliency: str, sink_filter: bool) -> None:
    options = SelectionOptions(grouping, saliency, sink_filter)  # type: ignore[arg-type]
    states = {n: torch.randn(1, 24, 8) for n in range(6)}
    stream = TokenStream(PROFILE, PATCHES, options=options)
    for layer in stream.layers:
        stream.take(layer, states[layer])
    tokens = stream.finish().map(lambda values: values[0])
    ours = analyze_tokens([tokens], PROFILE, options=options)
    assert_same(ours, analyze_image(states, PROFILE, PATCHES, options=options))


@pytest.mark.parametrize("num_tokens", [256, 1024])
def test_at_most_four_states_are_held_beside_the_encoders_own(num_tokens: int) -> None:
    profile = built_in_profile("qwen2.5-vl")
    width = 1280
    order = torch.randperm(num_tokens * 4)

    def encoder() -> Iterator[tuple[int, Tensor]]:
        state = torch.randn(1, num_tokens * 4, width).bfloat16()
        for layer in range(33):
            yield layer, state
            state = state * 0.9

    with PeakMemory(order) as alone:
        for _ in encoder():
            pass
    with PeakMemory(order) as together:
        streamed(encoder(), TokenStream(profile, 4, order=order, copies=True), profile)
    state_bytes = num_tokens * 4 * width * 2
    assert together.peak - alone.peak <= 4 * state_bytes


def test_rows_of_one_tensor_are_stacked_without_a_copy() -> None:
    batch = torch.randn(5, 7, 3)
    assert stacked(list(batch)).data_ptr() == batch.data_ptr()
    every_other = stacked([batch[row, 1:] for row in (0, 2, 4)])
    assert torch.equal(every_other, batch[::2, 1:])
    assert every_other.data_ptr() == batch[0, 1:].data_ptr()
    for rows in ([batch[0], batch[0]], [batch[2], batch[0]], [batch[0], batch[1].clone()]):
        assert torch.equal(stacked(rows), torch.stack(rows))

"""Positions of kept tokens, against a plain oracle, under any schedule of either model runner."""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import MultiModalConfig
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu.model_states import resolve_model_state_cls
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mm_pruning import MultiModalPruner, maybe_create_mm_pruner

from msdg_vllm.engine.worker.model_state import PositionPlacer, PruningModelState
from msdg_vllm.engine.worker.positions import (
    NUM_COLUMNS,
    FramesInText,
    MediaGrid,
    decode_positions,
    encode_positions,
    grid_positions,
    place_kept_tokens,
    prompt_positions,
    turn_on_position_hook,
    without_positions,
)
from msdg_vllm.models.qwen2_vl import PruningQwenVL

WIDTH = 5


@dataclass
class Item:
    """An image or video and the tokens kept of it."""

    shape: tuple[int, int, int]
    frame_step: float
    kept: list[int]

    @property
    def num_tokens(self) -> int:
        frames, rows, columns = self.shape
        return frames * rows * columns

    def embeddings(self, dtype: torch.dtype) -> torch.Tensor:
        """What the encoder leaves in the cache: the token's index in the first column."""
        rows = torch.zeros(len(self.kept), WIDTH, dtype=dtype)
        rows[:, 0] = torch.tensor(self.kept)
        if len(self.kept) == self.num_tokens:
            return rows
        columns = encode_positions(grid_positions(self.shape, self.frame_step))[self.kept]
        return torch.cat([rows, columns.to(dtype)], dim=1)


@dataclass
class Prompt:
    """Texts with one item between each two of them, and where everything is."""

    text_lengths: list[int]
    items: list[Item]
    expected: list[tuple[int, int, int]] = field(default_factory=list)
    media: list[MediaGrid] = field(default_factory=list)
    next_position: int = 0

    def __post_init__(self) -> None:
        """The oracle: number all tokens of the whole prompt one by one, then drop the pruned."""
        start = 0
        for text_length, item in zip(self.text_lengths, [*self.items, None], strict=True):
            for _ in range(text_length):
                self.expected.append((start, start, start))
                start += 1
            if item is None:
                continue
            offset = len(self.expected)
            last = start
            index = 0
            for frame in range(item.shape[0]):
                for row in range(item.shape[1]):
                    for column in range(item.shape[2]):
                        place = (
                            start + int(frame * item.frame_step),
                            start + row,
                            start + column,
                        )
                        last = max(last, *place)
                        if index in item.kept:
                            self.expected.append(place)
                        index += 1
            self.media.append(MediaGrid(offset, len(item.kept), item.shape, item.frame_step))
            start = last + 1
        self.next_position = start

    @property
    def length(self) -> int:
        return len(self.expected)

    def chunk(self, start: int, end: int, cache: list[torch.Tensor]) -> list[torch.Tensor]:
        """The embeddings a runner gathers for tokens `start` to `end`."""
        parts = []
        for item, rows in zip(self.media, cache, strict=True):
            first = max(start, item.offset) - item.offset
            last = min(end, item.offset + item.length) - item.offset
            if first < last:
                parts.append(rows[first:last])
        return parts


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    items = []
    for _ in range(draw(st.integers(0, 4))):
        frames = draw(st.sampled_from([1, 1, 1, 2, 5]))
        shape = (frames, draw(st.integers(1, 6)), draw(st.integers(1, 6)))
        step = 1.0 if frames == 1 else draw(st.sampled_from([0.5, 1.0, 1.7, 4.0]))
        num_tokens = frames * shape[1] * shape[2]
        budget = draw(st.one_of(st.integers(1, num_tokens), st.just(num_tokens)))
        kept = sorted(random.Random(draw(st.integers(0, 99))).sample(range(num_tokens), budget))
        items.append(Item(shape, step, kept))
    texts = [draw(st.integers(0, 4)) for _ in range(len(items) + 1)]
    texts[0] = max(texts[0], 1)
    return Prompt(texts, items)


chunkings = st.lists(st.integers(1, 30), min_size=40, max_size=40)


def walk(
    prompt: Prompt,
    positions: torch.Tensor,
    delta: int,
    start: int,
    chunk_sizes: list[int],
    dtype: torch.dtype,
    *,
    end: int | None = None,
    one_width: bool = False,
) -> torch.Tensor:
    """Compute a prompt in chunks as a runner does, holding each chunk to the oracle."""
    cache = [item.embeddings(dtype) for item in prompt.items]
    if one_width:
        cache = [rows if rows.shape[1] > WIDTH else without_positions(rows) for rows in cache]
        assert len({rows.shape[1] for rows in cache}) <= 1
    end = prompt.length if end is None else end
    for size in chunk_sizes:
        if start >= end:
            break
        stop = min(start + size, end)
        parts = prompt.chunk(start, stop, cache)
        clean, placed, new_delta = place_kept_tokens(positions, parts, start, WIDTH)
        assert [part.tolist() for part in clean] == [part[:, :WIDTH].tolist() for part in parts]
        positions.copy_(placed)
        assert positions[:, start:stop].T.tolist() == [list(p) for p in prompt.expected[start:stop]]
        assert new_delta == delta
        start = stop
    return positions


@settings(deadline=None)
@given(prompts())
def test_without_pruning_positions_are_those_of_vllm(prompt: Prompt) -> None:
    whole = Prompt(
        prompt.text_lengths,
        [Item(item.shape, item.frame_step, list(range(item.num_tokens))) for item in prompt.items],
    )
    if not whole.items:
        return
    stock, stock_delta = stock_positions(whole)
    assert stock.T.tolist() == [list(place) for place in whole.expected]
    ours, delta = prompt_positions(whole.length, whole.media)
    assert ours.tolist() == stock.tolist()
    assert delta == stock_delta


def stock_positions(prompt: Prompt) -> tuple[torch.Tensor, int]:
    """vLLM's own positions of an unpruned prompt."""

    def element(value: Any) -> Any:
        return SimpleNamespace(data=torch.tensor(value))

    features = []
    for item in prompt.media:
        frames, rows, columns = item.shape
        grid = element([frames, rows * 2, columns * 2])
        data = (
            {"image_grid_thw": grid}
            if frames == 1
            else {"video_grid_thw": grid, "second_per_grid_ts": element(item.frame_step)}
        )
        features.append(
            MultiModalFeatureSpec(
                data=data,  # type: ignore[arg-type]
                modality="image" if frames == 1 else "video",
                identifier="",
                mm_position=PlaceholderRange(offset=item.offset, length=item.length),
            )
        )
    stock = Qwen2_5_VLForConditionalGeneration
    model = SimpleNamespace(
        config=SimpleNamespace(
            vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=1)
        )
    )
    model.iter_mm_grid_thw = lambda features: stock.iter_mm_grid_thw(model, features)
    positions, delta = stock.get_mrope_input_positions(model, [0] * prompt.length, features)
    return positions, delta


@settings(deadline=None)
@given(
    prompts(),
    chunkings,
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
)
def test_every_chunk_gets_the_positions_of_the_whole_image(
    prompt: Prompt, chunk_sizes: list[int], dtype: torch.dtype, one_width: bool
) -> None:
    positions, delta = prompt_positions(prompt.length, prompt.media)
    assert delta == prompt.next_position - prompt.length
    walk(prompt, positions, delta, 0, chunk_sizes, dtype, one_width=one_width)


@settings(deadline=None)
@given(prompts(), st.data())
def test_text_is_final_before_the_encoder_has_run(prompt: Prompt, data: st.DataObject) -> None:
    positions, delta = prompt_positions(prompt.length, prompt.media)
    # A prefix hit may cover any part of the prompt, whole images among them.
    start = data.draw(st.integers(0, prompt.length - 1))
    walk(prompt, positions, delta, start, [prompt.length], torch.bfloat16)
    is_media = [any(i.offset <= n < i.offset + i.length for i in prompt.media)
                for n in range(prompt.length)]  # fmt: skip
    fresh, _ = prompt_positions(prompt.length, prompt.media)
    for n in range(prompt.length):
        if not is_media[n]:
            assert tuple(fresh[:, n].tolist()) == prompt.expected[n]


@settings(deadline=None)
@given(prompts(), chunkings, chunkings, chunkings, st.data())
def test_preempted_requests_are_replayed_exactly_on_the_v1_runner(
    prompt: Prompt,
    first: list[int],
    second: list[int],
    third: list[int],
    data: st.DataObject,
) -> None:
    """V1 keeps one tensor per request: positions written before a preemption are still in it."""
    positions, delta = prompt_positions(prompt.length, prompt.media)
    for chunk_sizes in (first, second):
        start = data.draw(st.integers(0, prompt.length - 1))
        end = data.draw(st.integers(start, prompt.length))
        walk(prompt, positions, delta, start, chunk_sizes, torch.bfloat16, end=end)
    walk(prompt, positions, delta, 0, third, torch.bfloat16)


class StubRopeState:
    """The part of the V2 runner's `RopeState` that needs no Triton kernel."""

    def __init__(self, positions: torch.Tensor, delta: int) -> None:
        self.buffer = torch.zeros(3, positions.shape[1] + 7, dtype=torch.int32)
        self.buffer[:, : positions.shape[1]] = positions
        self.delta = delta

    def read_prefill_positions(self, req_idx: int, length: int) -> torch.Tensor:
        return self.buffer[:, :length]

    def update_prefill_positions(self, req_idx: int, positions: torch.Tensor, delta: int) -> None:
        self.buffer[:, : positions.shape[1]].copy_(positions)
        self.delta = delta


class StubModel:
    """Hands positions on as the pruned models do."""

    def recompute_mrope_positions(
        self,
        input_ids: Any,
        multimodal_embeddings: Any,
        mrope_positions: torch.Tensor,
        num_computed_tokens: int,
    ) -> Any:
        return place_kept_tokens(mrope_positions, multimodal_embeddings, num_computed_tokens, WIDTH)


@pytest.mark.parametrize("pruner_class", [MultiModalPruner, PositionPlacer])
@settings(deadline=None)
@given(prompts(), chunkings, st.data())
def test_v2_runner_pruner_settles_the_same_positions(
    pruner_class: type[MultiModalPruner],
    prompt: Prompt,
    chunk_sizes: list[int],
    data: st.DataObject,
) -> None:
    positions, delta = prompt_positions(prompt.length, prompt.media)
    rope_state = StubRopeState(positions, delta)
    features = [
        SimpleNamespace(mm_position=PlaceholderRange(offset=item.offset, length=item.length))
        for item in prompt.media
    ]
    pruner = pruner_class(
        StubModel(),  # type: ignore[arg-type]
        rope_state,  # type: ignore[arg-type]
        SimpleNamespace(mm_features={"r": features}),  # type: ignore[arg-type]
        WIDTH,
    )
    cache = [item.embeddings(torch.bfloat16) for item in prompt.items]
    start = data.draw(st.integers(0, prompt.length - 1))
    for size in chunk_sizes:
        if start >= prompt.length:
            break
        stop = min(start + size, prompt.length)
        parts = prompt.chunk(start, stop, cache)
        batch = SimpleNamespace(
            idx_mapping_np=np.array([0]),
            prefill_len_np=np.array([prompt.length]),
            num_computed_prefill_tokens_np=np.array([start]),
            num_scheduled_tokens=np.array([stop - start]),
            req_ids=["r"],
        )
        states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=torch.zeros(1, prompt.length + 7, dtype=torch.int32))
        )
        clean = pruner.recompute(parts, batch, states)  # type: ignore[arg-type]
        assert all(part.shape[1] == WIDTH for part in clean)
        assert [part.shape for part in pruner.strip(parts)] == [part.shape for part in clean]
        placed = rope_state.buffer[:, start:stop].T.tolist()
        assert placed == [list(place) for place in prompt.expected[start:stop]]
        assert rope_state.delta == delta
        start = stop


def placer_on_device(num_features: int, length: int) -> tuple[PositionPlacer, Any]:
    """A placer whose positions are on a device that nobody can read: its tensors have no data."""
    positions = torch.empty(3, length, dtype=torch.int32, device="meta")
    rope_state = SimpleNamespace(read_prefill_positions=lambda index, length: positions)
    features = [
        SimpleNamespace(mm_position=PlaceholderRange(offset=1 + 5 * n, length=4))
        for n in range(num_features)
    ]
    placer = PositionPlacer(
        None,  # type: ignore[arg-type]
        rope_state,  # type: ignore[arg-type]
        SimpleNamespace(mm_features={"r": features}),  # type: ignore[arg-type]
        WIDTH,
    )
    batch = SimpleNamespace(
        idx_mapping_np=np.array([0]),
        prefill_len_np=np.array([length]),
        num_computed_prefill_tokens_np=np.array([0]),
        num_scheduled_tokens=np.array([length]),
        req_ids=["r"],
    )
    return placer, batch


def test_v2_runner_waits_for_no_device_when_it_places_kept_tokens() -> None:
    placer, batch = placer_on_device(2, 12)
    embeddings = [
        torch.empty(4, WIDTH + NUM_COLUMNS, device="meta"),
        torch.empty(4, WIDTH, device="meta"),
    ]
    clean = placer.recompute(embeddings, batch, None)
    assert [rows.shape for rows in clean] == [(4, WIDTH), (4, WIDTH)]


def test_v2_runner_does_nothing_for_unpruned_items() -> None:
    placer, batch = placer_on_device(1, 12)
    placer.rope_state.read_prefill_positions = None  # type: ignore[method-assign, assignment]
    embeddings = [torch.empty(4, WIDTH, device="meta")]
    assert placer.recompute(embeddings, batch, None) is embeddings


def test_v2_runner_takes_the_state_of_a_pruned_model() -> None:
    model = object.__new__(PruningQwenVL)
    model.__dict__["_modules"] = {}
    assert resolve_model_state_cls(None, model) is PruningModelState  # type: ignore[arg-type]
    built = SimpleNamespace(row_width=3 * WIDTH)
    stock = SimpleNamespace(model=built, rope_state=2, encoder_cache=3, inputs_embeds_size=WIDTH)

    def stock_init(state: Any, *args: Any) -> None:
        state.mm_pruner = stock

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DefaultModelState, "__init__", stock_init)
        pruner = PruningModelState(None).mm_pruner
    assert isinstance(pruner, PositionPlacer)
    held: Any = pruner
    assert (held.model, held.rope_state, held.encoder_cache) == (built, 2, 3)
    assert held.inputs_embeds_size == 3 * WIDTH


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1000, 1000), (1, 1, 4096), (700, 3, 3)])
def test_positions_travel_losslessly(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    positions = grid_positions(shape, frame_step=50.0)
    carried = encode_positions(positions).to(dtype)
    assert carried.shape == (len(positions), NUM_COLUMNS)
    assert torch.equal(decode_positions(carried), positions)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**24 - 1), st.sampled_from([torch.bfloat16, torch.float16]))
def test_any_context_length_travels_losslessly(position: int, dtype: torch.dtype) -> None:
    positions = torch.tensor([[position, 0, 2**24 - 1]])
    assert torch.equal(decode_positions(encode_positions(positions).to(dtype)), positions)


def test_nothing_to_do_leaves_positions_and_embeddings_alone() -> None:
    positions = torch.arange(9).expand(3, -1)
    embeddings = [torch.zeros(2, WIDTH)]
    clean, placed, delta = place_kept_tokens(positions, embeddings, 0, WIDTH)
    assert placed is positions
    assert clean[0] is embeddings[0]
    assert delta == 0


def test_text_behind_a_tall_image_starts_after_its_last_row() -> None:
    prompt = Prompt([1, 2], [Item((1, 9, 2), 1.0, [0, 17])])
    positions, _ = prompt_positions(prompt.length, prompt.media)
    assert positions[:, -2:].tolist() == [[10, 11]] * 3


def test_hook_is_on_for_the_configuration_of_a_pruned_model_only() -> None:
    pruned, other = MultiModalConfig(), MultiModalConfig()
    turn_on_position_hook(pruned)
    assert pruned.is_multimodal_pruning_enabled()
    assert pickle.loads(pickle.dumps(pruned)).is_multimodal_pruning_enabled()
    assert not other.is_multimodal_pruning_enabled()


def test_v2_runner_makes_its_pruner_for_a_pruned_model() -> None:
    mm_config = MultiModalConfig()
    turn_on_position_hook(mm_config)
    model_config = SimpleNamespace(
        multimodal_config=mm_config, get_inputs_embeds_size=lambda: WIDTH
    )
    model = SimpleNamespace(supports_multimodal_pruning=True)
    pruner = maybe_create_mm_pruner(model_config, model, object(), object())  # type: ignore[arg-type]
    assert isinstance(pruner, MultiModalPruner)


@pytest.mark.parametrize("is_pruned", [True, False])
def test_cpu_runner_calls_the_hook_for_pruned_models_only(is_pruned: bool) -> None:
    mm_config = MultiModalConfig()
    turn_on_position_hook(mm_config)
    runner: Any = object.__new__(CPUModelRunner)
    runner.model_config = SimpleNamespace(
        multimodal_config=mm_config if is_pruned else MultiModalConfig()
    )
    runner.model = SimpleNamespace(supports_multimodal_pruning=True)
    runner.is_multimodal_pruning_enabled = False  # as its base class does
    assert runner.is_multimodal_pruning_enabled is is_pruned


def frames_in_text(num_kept: int) -> FramesInText:
    """Two frames of 2 x 3 tokens, each between a word of two tokens and one of one."""
    pad, before, behind = 8, [30, 31], [40]
    token_ids = [*before, *[pad] * 6, *behind] * 2
    return FramesInText(5, len(token_ids) - 12 + num_kept, token_ids, pad, (2, 3))


def test_frames_in_text_start_behind_their_text_and_take_their_longer_side() -> None:
    video = frames_in_text(12)
    positions = video.positions()
    assert not video.is_pruned
    assert video.extent == 2 * (2 + 3 + 1)
    assert positions[[0, 1, 8, 9, 10, 17]].tolist() == [[n] * 3 for n in (0, 1, 5, 6, 7, 11)]
    assert positions[2:8].tolist() == [[2, 2 + h, 2 + w] for h in range(2) for w in range(3)]
    assert positions[11:17].tolist() == [[8, 8 + h, 8 + w] for h in range(2) for w in range(3)]
    assert video.text_ids == [30, 31, 40] * 2
    assert video.is_text.tolist() == ([True] * 2 + [False] * 6 + [True]) * 2


def test_text_behind_pruned_frames_goes_on_where_it_would_without_pruning() -> None:
    whole, _ = prompt_positions(5 + 18 + 4, [frames_in_text(12)])
    video = frames_in_text(3)
    assert video.is_pruned
    pruned, delta = prompt_positions(5 + 9 + 4, [video])
    assert pruned[:, :5].equal(whole[:, :5])
    assert pruned[:, -4:].equal(whole[:, -4:])
    assert (pruned[0, 5:14] < 0).all()
    assert delta == int(whole.max()) + 1 - 18

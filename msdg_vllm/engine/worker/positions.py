"""M-RoPE positions of kept tokens: each keeps the (t, h, w) it had in the whole image or video.

vLLM asks for the positions of a prompt before the encoder has run, when nobody knows yet which
tokens will be kept. So a kept token's position travels with its embedding, and reaches the prompt
when the chunk that holds the token is computed:

- `prompt_positions` gives every text token its final position at once, and marks the tokens of
  pruned items as pending;
- `encode_positions` turns positions within an item into columns behind the embedding, exact in
  16-bit floats;
- `place_kept_tokens`, called for each chunk, takes the columns off again and settles the pending
  tokens of the chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from vllm.config import MultiModalConfig
from vllm.model_executor.models.interfaces import supports_multimodal_pruning
from vllm.platforms import current_platform
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

# bfloat16 counts exactly up to 256, so that a position goes as digits of that base; three of them
# cover every context length.
_DIGIT_BASE = 256
_NUM_DIGITS = 3
NUM_COLUMNS = 3 * _NUM_DIGITS
"""Columns that a position takes behind an embedding."""

# In place of a digit: the row is one of an unpruned item.
_NO_POSITION = -1

# A pending token holds -1 - x in place of a position: on the first axis with x = where its item
# starts, on the second with x = where the text behind the item goes on.
_PENDING = "msdg_pending_positions"


@dataclass(frozen=True, slots=True)
class MediaGrid:
    """A medium whose tokens are one grid, or one grid for each frame.

    Attributes:
        offset: Index in the prompt of its first token.
        length: How many tokens the prompt holds of it.
        shape: Its merged grid, (frames, rows, columns).
        frame_step: Distance of consecutive frames on the time axis.
    """

    offset: int
    length: int
    shape: tuple[int, int, int]
    frame_step: float = 1.0

    @property
    def is_pruned(self) -> bool:
        """Whether the prompt holds fewer tokens than the grid has."""
        frames, rows, columns = self.shape
        return self.length < frames * rows * columns

    @property
    def extent(self) -> int:
        """Positions that the item takes up, however many of its tokens are kept."""
        frames, rows, columns = self.shape
        return max(int((frames - 1) * self.frame_step) + 1, rows, columns)

    def positions(self) -> torch.Tensor:
        """Positions of all its tokens relative to its start, `(N, 3)` int64."""
        return grid_positions(self.shape, self.frame_step)


@dataclass(frozen=True, slots=True)
class FramesInText:
    """A video whose frames stand in text, as timestamps are; the text belongs to the video.

    Attributes:
        offset: Index in the prompt of its first token.
        length: How many tokens the prompt holds of it, text included.
        token_ids: Its tokens before pruning.
        pad_id: Which of them stand for visual tokens.
        shape: Rows and columns of a frame's merged grid.
    """

    offset: int
    length: int
    token_ids: Sequence[int]
    pad_id: int
    shape: tuple[int, int]

    @property
    def is_pruned(self) -> bool:
        """Whether the prompt holds fewer tokens than the video has."""
        return self.length < len(self.token_ids)

    @property
    def extent(self) -> int:
        """Positions that the video takes up, however many of its tokens are kept."""
        num_frames = self.token_ids.count(self.pad_id) // (self.shape[0] * self.shape[1])
        num_texts = len(self.token_ids) - self.token_ids.count(self.pad_id)
        return num_texts + num_frames * max(self.shape)

    @property
    def text_ids(self) -> list[int]:
        """Its tokens that are text."""
        return [token_id for token_id in self.token_ids if token_id != self.pad_id]

    @property
    def is_text(self) -> torch.Tensor:
        """Which of its tokens are text, `(N,)`."""
        return torch.tensor(self.token_ids) != self.pad_id

    def positions(self) -> torch.Tensor:
        """Positions of all its tokens relative to its start, `(N, 3)` int64."""
        parts: list[torch.Tensor] = []
        start = 0
        for is_pad, run in groupby(self.token_ids, lambda token_id: token_id == self.pad_id):
            count = len(list(run))
            if is_pad:
                parts.append(grid_positions((1, *self.shape)) + start)
                start += max(self.shape)
            else:
                parts.append(torch.arange(start, start + count).unsqueeze(1).expand(-1, 3))
                start += count
        return torch.cat(parts)


Medium = MediaGrid | FramesInText
"""An image or video in a prompt: where it is there, and which positions it takes up."""


def grid_positions(
    shape: tuple[int, int, int], frame_step: float = 1.0, device: torch.device | None = None
) -> torch.Tensor:
    """Positions (t, h, w) of all tokens of a merged grid relative to its start, `(N, 3)` int64."""
    frames, rows, columns = shape
    time = (torch.arange(frames, dtype=torch.float64, device=device) * frame_step).long()
    height = torch.arange(rows, device=device)
    width = torch.arange(columns, device=device)
    return torch.cartesian_prod(time, height, width)


def encode_positions(positions: torch.Tensor) -> torch.Tensor:
    """Digits of positions, `(.., 3)` to `(.., NUM_COLUMNS)`: exact in bfloat16 and float16."""
    digits = positions.unsqueeze(-2) // _place_values(positions.device) % _DIGIT_BASE
    return digits.flatten(-2)


def with_positions(
    positions: torch.Tensor, tokens: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """Kept tokens `(B, D)` with columns behind them that say where they stood, `(B,)`.

    An item that keeps all its tokens has the positions that vLLM gave it, and needs no columns.
    """
    if len(kept) == len(positions):
        return tokens
    columns = encode_positions(positions[kept]).to(tokens.dtype)
    return torch.cat([tokens, columns], dim=-1)


def decode_positions(columns: torch.Tensor) -> torch.Tensor:
    """The positions that `encode_positions` was given, in int64 whatever dtype carried them."""
    digits = columns.long().unflatten(-1, (_NUM_DIGITS, 3))
    return (digits * _place_values(columns.device)).sum(dim=-2)


def _place_values(device: torch.device) -> torch.Tensor:
    places: torch.Tensor = _DIGIT_BASE ** torch.arange(_NUM_DIGITS, device=device)
    return places.unsqueeze(-1)


def prompt_positions(num_tokens: int, media: Iterable[Medium]) -> tuple[torch.Tensor, int]:
    """Positions of a prompt, `(3, num_tokens)`, and what decoding adds to a token's index.

    Equal to vLLM's own for the prompt without pruning, less the tokens that were pruned: text
    goes on behind an item where it would have gone on without pruning.
    """
    parts: list[torch.Tensor] = []
    filled = start = 0

    def add_text(end: int) -> None:
        nonlocal filled, start
        parts.append(torch.arange(start, start + end - filled).expand(3, -1))
        start += end - filled
        filled = end

    for item in sorted(media, key=lambda item: item.offset):
        add_text(item.offset)
        if item.is_pruned:
            mark = torch.tensor([-1 - start, -1 - (start + item.extent), -1])
            parts.append(mark.unsqueeze(1).expand(3, item.length))
        else:
            parts.append(item.positions().T + start)
        start += item.extent
        filled += item.length
    add_text(num_tokens)
    positions = torch.cat(parts, dim=1)
    # vLLM's V1 runner keeps this very tensor for the life of the request and writes results of
    # `place_kept_tokens` into it; after a preemption the same tokens come again.
    setattr(positions, _PENDING, positions.clone())
    return positions, start - num_tokens


def place_kept_tokens(
    positions: torch.Tensor,
    embeddings: Sequence[torch.Tensor],
    num_computed_tokens: int,
    width: int,
) -> tuple[list[torch.Tensor], torch.Tensor, int]:
    """Settle the pending tokens of a chunk from what its embeddings carry.

    Only pending tokens are written, so that unpruned items and text stay what they are.

    Args:
        positions: Positions of the prompt, `(3, L)`, from `prompt_positions`.
        embeddings: The chunk's part of each item's embeddings, in order; `NUM_COLUMNS` wider
            than `width` when the item is pruned, or came from `without_positions`.
        num_computed_tokens: Index in the prompt at which the chunk starts.
        width: Width of an embedding.

    Returns:
        The embeddings without columns, the positions, and what decoding adds to an index.
    """
    # The V1 runner holds positions on the host, so that reading them waits for nothing.
    pending = getattr(positions, _PENDING, positions)
    delta = _decoding_delta(pending)
    if not carries_positions(embeddings, width):
        return list(embeddings), positions, delta
    with gpu_sync_allowed():
        clean, placed = settle_positions(pending, embeddings, num_computed_tokens, width)
    return clean, placed, delta


def without_positions(rows: torch.Tensor) -> torch.Tensor:
    """Rows of an unpruned item, as wide as those of a pruned one."""
    return F.pad(rows, (0, NUM_COLUMNS), value=_NO_POSITION)


def carries_positions(embeddings: Sequence[torch.Tensor], width: int) -> bool:
    """Whether any of the embeddings is one of a pruned item."""
    return any(rows.shape[1] > width for rows in embeddings)


def settle_positions(
    pending: torch.Tensor,
    embeddings: Sequence[torch.Tensor],
    num_computed_tokens: int,
    width: int,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Take the columns off a chunk's embeddings and put what they say in place of pending tokens.

    Waits for the device only if the positions are on another one than the embeddings.
    """
    carried = torch.cat([rows[:, width:] for rows in embeddings if rows.shape[1] > width])
    says_one = carried[:, 0] != _NO_POSITION
    # Rows that say one go first, in their order.
    carried = carried[says_one.logical_not().argsort(stable=True)]
    within = decode_positions(carried).to(pending.device).T  # (3, R)
    num_rows = says_one.sum().to(pending.device)
    tail = pending[:, num_computed_tokens:]
    is_pending = tail[0] < 0
    # Rows come in the order of the prompt: the n-th pending token from here on takes row n.
    row = is_pending.cumsum(0) - 1
    is_here = is_pending & (row < num_rows)
    settled = within[:, row.clamp(0, within.shape[1] - 1)] + (-1 - tail[0])
    placed = torch.cat(
        [pending[:, :num_computed_tokens], torch.where(is_here, settled, tail)], dim=1
    )
    return [rows[:, :width] for rows in embeddings], placed


def _decoding_delta(pending: torch.Tensor) -> int:
    """Position of the first generated token less its index."""
    last = pending[:, -1].tolist()
    following = -1 - last[1] if last[0] < 0 else max(last) + 1
    return int(following - pending.shape[1])


def turn_on_position_hook(mm_config: MultiModalConfig) -> None:
    """Have vLLM's model runners call the model's `recompute_mrope_positions`.

    They ask the configuration whether embeddings carry positions, once the model is built. Stock
    vLLM says yes only with a video pruning rate.
    """
    mm_config.__dict__["is_multimodal_pruning_enabled"] = _yes
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        # Its `load_model` never asks; the attribute its base class sets keeps saying no.
        runner_class: Any = CPUModelRunner
        runner_class.is_multimodal_pruning_enabled = property(
            _embeddings_carry_positions, lambda runner, value: None
        )


def _yes() -> bool:
    return True


def _embeddings_carry_positions(runner: Any) -> bool:
    mm_config = runner.model_config.multimodal_config
    return (
        supports_multimodal_pruning(runner.get_model())
        and mm_config is not None
        and mm_config.is_multimodal_pruning_enabled()
    )

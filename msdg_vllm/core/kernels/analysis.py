"""The query-free half of Algorithm 1 on a device: a fixed number of launches for any batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from msdg_vllm.core import kernels
from msdg_vllm.core.analysis import ImageSignals
from msdg_vllm.core.grouping import MAX_ITERATIONS
from msdg_vllm.core.kernels import grouping, large_grouping, launch, signals, stacked
from msdg_vllm.core.profiles import EncoderProfile
from msdg_vllm.core.stream import TokenSignals
from msdg_vllm.core.tiles import round_up

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_TILE, _DEPTH, _COLUMNS, _SPAN = 64, 32, 32, 1024
# Few columns, many programs: each has to look at all tokens.
_SUM_COLUMNS = 16


@dataclass(frozen=True, slots=True)
class Directions:
    """Unit directions of R images, filled up to whole tiles with zeros.

    Attributes:
        units: `(R, N', d')` float32.
        candidates: `(R, N')` int8.
        moved: `(R, N')` int8, 1 for candidates whose direction is not zero.
    """

    units: Tensor
    candidates: Tensor
    moved: Tensor


def analyze_tokens(
    images: Sequence[TokenSignals], profile: EncoderProfile, valid: Tensor | None
) -> ImageSignals:
    """Return the signals of R images of one size: `analyze_image` with the paper's options.

    Args:
        images: What `directions` made of each, `(N,)` and `(N, d)`.
        profile: The settings for the encoder.
        valid: `(R, N)` bool, False for padding.
    """
    units = stacked([_known(image.directions) for image in images])
    activation = stacked([image.activation for image in images])
    moved = stacked([image.moved for image in images])
    num_rows, num_tokens = units.shape[:2]
    device = units.device
    padded_tokens = round_up(num_tokens, _TILE)
    sink_mask = torch.empty(num_rows, num_tokens, dtype=torch.bool, device=device)
    tiles = Directions(
        units=_in_tiles(units),
        candidates=torch.empty(num_rows, padded_tokens, dtype=torch.int8, device=device),
        moved=torch.empty(num_rows, padded_tokens, dtype=torch.int8, device=device),
    )
    launch(
        signals.candidate_kernel, (-(-padded_tokens // _SPAN), num_rows),
        activation, activation.stride(0), moved.view(torch.int8), moved.stride(0),
        # Not read without padding; a kernel wants some address all the same.
        (sink_mask if valid is None else valid.contiguous()).view(torch.int8),
        sink_mask.view(torch.int8), tiles.candidates, tiles.moved,
        num_tokens, padded_tokens, profile.sink_threshold,
        HAS_VALID=valid is not None, TOKENS=_SPAN, num_warps=4,
    )  # fmt: skip
    max_groups = min(profile.num_groups, num_tokens)
    groups, num_groups = group(tiles, num_tokens, max_groups, profile.seed)
    return ImageSignals(
        saliency=stacked([image.saliency for image in images]),
        groups=groups,
        num_groups=num_groups,
        sink_mask=sink_mask,
        sink_activation=activation,
        max_groups=max_groups,
    )


def _known(directions: Tensor | None) -> Tensor:
    assert directions is not None
    return directions


def _in_tiles(units: Tensor) -> Tensor:
    """`(R, N, d)` filled up with zeros to whole tiles; not copied where it is whole already."""
    num_rows, num_tokens, width = units.shape
    shape = num_rows, round_up(num_tokens, _TILE), round_up(width, _TILE)
    if shape == units.shape and units.is_contiguous():
        return units
    tiles = units.new_zeros(shape)
    tiles[:, :num_tokens, :width] = units
    return tiles


def group_rows(
    directions: Sequence[Tensor], candidates: Tensor, num_groups: Tensor, max_groups: int, seed: int
) -> Tensor:
    """Return the group of each token, `(R, N)`: `group_tokens` by kernels."""
    num_tokens = len(directions[0])
    to_tiles = (0, round_up(num_tokens, _TILE) - num_tokens)
    units = torch.stack(list(directions)).masked_fill_(~candidates.unsqueeze(-1), 0.0)
    padded = F.pad(candidates, to_tiles)
    groups, _ = group(
        Directions(
            units=_in_tiles(units),
            candidates=padded.to(torch.int8),
            # Without a token that moved there is one group.
            moved=(padded & (num_groups > 1).unsqueeze(-1)).to(torch.int8),
        ),
        num_tokens,
        max_groups,
        seed,
    )
    return groups


def group(
    directions: Directions, num_tokens: int, max_groups: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Return the group of each token, `(R, N)`, and K of each row, `(R,)`."""
    if num_tokens <= kernels.MAX_PAIRED_TOKENS:
        return _group_by_gram(directions, num_tokens, max_groups, seed)
    return _group_by_blocks(directions, num_tokens, max_groups, seed)


def _group_by_gram(
    directions: Directions, num_tokens: int, max_groups: int, seed: int
) -> tuple[Tensor, Tensor]:
    num_rows, padded, width = directions.units.shape
    device = directions.units.device
    num_tiles, num_blocks = padded // _TILE, padded // _COLUMNS
    padded_groups = max(16, triton.next_power_of_2(max_groups))
    gram = torch.empty(num_rows, padded, padded, device=device)
    launch(
        grouping.gram_kernel, (num_tiles, num_tiles, num_rows),
        directions.units, gram, padded, width, TILE=_TILE, DEPTH=_DEPTH, num_warps=4,
    )  # fmt: skip

    constants = {
        "GROUPS": padded_groups,
        "BLOCKS": triton.next_power_of_2(num_blocks),
    }
    num_groups = torch.empty(num_rows, dtype=torch.int64, device=device)
    nearest = torch.empty(num_rows, padded, device=device)
    # What a launch reads and what it writes: each in two places that take turns.
    sums = torch.empty(2, num_rows, padded_groups, padded, device=device)
    squares = torch.empty(2, num_rows, padded_groups, constants["BLOCKS"], device=device)
    labels = torch.empty(2, num_rows, padded, dtype=torch.int32, device=device)
    losses = torch.empty(2, num_rows, device=device)
    converged = torch.empty(2, num_rows, dtype=torch.int32, device=device)
    states = [
        tuple(both[turn] for both in (sums, squares, labels, losses, converged)) for turn in (0, 1)
    ]
    launch(
        grouping.seed_kernel, (num_rows,),
        gram, directions.candidates, directions.moved, num_groups,
        sums[0], squares[0], squares[1], labels[0], losses[0], converged[0],
        padded, max_groups, seed,
        TOKENS=triton.next_power_of_2(padded), num_warps=4, **constants,
    )  # fmt: skip
    for turn in range(MAX_ITERATIONS):
        launch(
            grouping.iterate_kernel, (num_blocks, num_rows),
            gram, directions.candidates, num_groups, nearest,
            *states[turn % 2], *states[(turn + 1) % 2], padded,
            TOKENS=triton.next_power_of_2(padded), ROWS=_TILE, COLUMNS=_COLUMNS, num_warps=4,
            **constants,
        )  # fmt: skip
    groups = torch.empty(num_rows, num_tokens, dtype=torch.int64, device=device)
    last = MAX_ITERATIONS % 2
    launch(
        grouping.finish_kernel, (num_blocks, num_rows),
        directions.candidates, num_groups, sums[last], squares[last], labels[last], converged[last],
        groups, num_tokens, padded, COLUMNS=_COLUMNS, num_warps=4, **constants,
    )  # fmt: skip
    return groups, num_groups


def _group_by_blocks(
    directions: Directions, num_tokens: int, max_groups: int, seed: int
) -> tuple[Tensor, Tensor]:
    num_rows, padded, width = directions.units.shape
    device = directions.units.device
    num_tiles, num_blocks = padded // _TILE, width // _SUM_COLUMNS
    groups, tiles, blocks = (
        max(16, triton.next_power_of_2(n)) for n in (max_groups, num_tiles, num_blocks)
    )
    constants = {"GROUPS": groups, "TOKEN_BLOCKS": tiles, "num_warps": 4}

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, device=device)

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    centroids, squares = floats(num_rows, groups, width), floats(num_rows, groups, blocks)
    nearest, distances = floats(num_rows, padded), floats(num_rows, tiles)
    smallest, places = floats(2, num_rows, tiles), integers(2, num_rows, tiles)
    changes, losses = integers(num_rows, tiles), floats(MAX_ITERATIONS + 1, num_rows)
    converged, num_candidates = integers(num_rows), integers(num_rows)
    labels = torch.empty(num_rows, padded, dtype=torch.int64, device=device)
    num_groups = torch.empty(num_rows, dtype=torch.int64, device=device)
    launch(
        large_grouping.start_kernel, (num_rows,),
        directions.candidates, directions.moved, num_groups, num_candidates,
        smallest, places, losses, converged, squares, padded, max_groups, seed,
        SPAN=_SPAN, WIDTH_BLOCKS=blocks, **constants,
    )  # fmt: skip
    for number in range(max_groups):
        now, then = number % 2, (number + 1) % 2
        launch(
            large_grouping.farthest_kernel, (num_tiles, num_rows),
            directions.units, directions.candidates, num_groups, centroids, nearest,
            smallest[now], places[now], smallest[then], places[then], padded, width, number,
            TILE=_TILE, DEPTH=_DEPTH, **constants,
        )  # fmt: skip

    def assign(is_first: bool) -> None:
        launch(
            large_grouping.assign_kernel, (num_tiles, num_rows),
            directions.units, directions.candidates, num_groups, centroids, squares, labels,
            nearest, distances, changes, converged, padded, width, int(is_first),
            WIDTH_BLOCKS=blocks, TILE=_TILE, DEPTH=_DEPTH, **constants,
        )  # fmt: skip

    assign(is_first=True)
    for turn in range(MAX_ITERATIONS):
        launch(
            large_grouping.update_kernel, (num_blocks, num_rows),
            directions.units, num_groups, num_candidates, centroids, squares, labels, nearest,
            distances, changes, losses[turn], losses[turn + 1], converged, padded, width, num_tiles,
            WIDTH_BLOCKS=blocks, ROWS=_TILE, COLUMNS=_SUM_COLUMNS, SPAN=_SPAN, **constants,
        )  # fmt: skip
        assign(is_first=False)
    return labels[:, :num_tokens], num_groups

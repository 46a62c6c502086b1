"""The query-free half of Algorithm 1: what an image says by itself (lines 1-5 and 7-13)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter

import torch
from torch import Tensor

from msdg_vllm.core import kernels
from msdg_vllm.core.errors import ShapeError
from msdg_vllm.core.grouping import group_tokens
from msdg_vllm.core.options import PAPER, SelectionOptions
from msdg_vllm.core.profiles import EncoderProfile
from msdg_vllm.core.signals import full_precision
from msdg_vllm.core.stream import TokenSignals, token_signals

# Rows that are handled together, by type of device; all of them where none is named. A GPU wants
# few launches, a CPU the directions of one image in its cache. The result is the same.
_ROWS_AT_ONCE = {"cpu": 1}


@dataclass(frozen=True, slots=True)
class ImageSignals:
    """What an image says by itself, for any question and any budget; a few numbers per token.

    Holds no reference to the encoder's states, so it can be kept for the next question.

    Attributes:
        saliency: u, `(.., N)` float32; 0 where it is not finite.
        groups: `(.., N)` int64, the group of each candidate; -1 for sinks and padding.
        num_groups: K of each row, `(..)` int64: at most `max_groups` and the number of candidates.
        sink_mask: `(.., N)`, True for sinks and for tokens whose states are not finite.
        sink_activation: `(.., N)` float32, absolute value at the sink coordinate; infinite for
            tokens whose states are not finite.
        max_groups: The largest K any row may have.
    """

    saliency: Tensor
    groups: Tensor
    num_groups: Tensor
    sink_mask: Tensor
    sink_activation: Tensor
    max_groups: int

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.groups.shape[-1]

    @property
    def candidate_mask(self) -> Tensor:
        """`(.., N)`, True for tokens that compete for the budget."""
        return self.groups >= 0

    def map(self, function: Callable[[Tensor], Tensor]) -> "ImageSignals":
        """Return the signals with `function` applied to each tensor, such as one that moves it."""
        return ImageSignals(
            saliency=function(self.saliency),
            groups=function(self.groups),
            num_groups=function(self.num_groups),
            sink_mask=function(self.sink_mask),
            sink_activation=function(self.sink_activation),
            max_groups=self.max_groups,
        )

    @classmethod
    def stack(cls, images: Sequence["ImageSignals"]) -> "ImageSignals":
        """Return the signals of images of one size as those of a batch."""
        names = [name for name in cls.__slots__ if name != "max_groups"]
        return cls(
            **{name: torch.stack([getattr(image, name) for image in images]) for name in names},
            max_groups=images[0].max_groups,
        )

    def __getitem__(self, rows: int | slice | Tensor) -> "ImageSignals":
        """Return the signals of one row, or of some rows, of a batch."""
        return self.map(lambda tensor: tensor[rows])


def analyze_image(
    states: Mapping[int, Tensor],
    profile: EncoderProfile,
    patches_per_token: int = 1,
    *,
    valid: Tensor | None = None,
    saliency: Tensor | None = None,
    options: SelectionOptions = PAPER,
) -> ImageSignals:
    """Return sinks, saliency and groups of an image: the query-free half of Algorithm 1.

    Leading dimensions hold images or tiles of one size; a row's result does not depend, bit for
    bit, on the rows beside it.

    Args:
        states: The state entering each layer that `options.layers(profile)` names (by default
            `profile.layers`), `(.., N * patches_per_token, d)` of any floating type. Patches
            that merge into one token are neighbours.
        profile: The settings for the encoder.
        patches_per_token: How many encoder patches merge into one visual token.
        valid: `(.., N)` bool, False for padding: neither a candidate nor a sink.
        saliency: `(.., N * patches_per_token)`, the scores of `options.saliency="given"`.
        options: Which variant of the method.
    """
    if (options.saliency == "given") != (saliency is not None):
        raise ShapeError(
            "saliency must be passed if, and only if, options.saliency is 'given', "
            f"got {None if saliency is None else tuple(saliency.shape)} "
            f"with options.saliency={options.saliency!r}"
        )
    layers = options.layers(profile)
    per_patch = [*_first_coordinates(states, layers), *([] if saliency is None else [saliency])]
    lead, num_tokens = _check_shapes(per_patch, patches_per_token)
    if options.sink_filter and profile.sink_state is not None:
        _check_sink_coordinate(profile, states[profile.sink_state].shape[-1])
    if valid is not None and valid.shape != (*lead, num_tokens):
        raise ShapeError(f"valid must be {(*lead, num_tokens)}, got {tuple(valid.shape)}")

    num_rows = prod(lead)
    by_row = {n: states[n].reshape(num_rows, *states[n].shape[-2:]) for n in layers}
    given = None if saliency is None else saliency.reshape(num_rows, -1)
    mask = None if valid is None else valid.reshape(num_rows, -1).bool()

    def analyzed(rows: slice) -> ImageSignals:
        signals = token_signals(
            {n: state[rows] for n, state in by_row.items()},
            profile,
            patches_per_token,
            None if given is None else given[rows],
            options,
        )
        images = [signals.map(itemgetter(row)) for row in range(len(signals.saliency))]
        own = None if mask is None else mask[rows]
        return analyze_tokens(images, profile, valid=own, options=options)

    parts = [analyzed(rows) for rows in _row_chunks(num_rows, per_patch[0].device)]
    return _joined(parts).map(lambda tensor: tensor.reshape((*lead, *tensor.shape[1:])))


@torch.no_grad()
def analyze_tokens(
    images: Sequence[TokenSignals],
    profile: EncoderProfile,
    *,
    valid: Tensor | None = None,
    options: SelectionOptions = PAPER,
) -> ImageSignals:
    """Return the signals of R images of one size, of whose states only those of tokens are left.

    `analyze_image` is `token_signals`, then this.

    Args:
        images: The signals of the tokens of each image, `(N,)`, from a `TokenStream`.
        profile: The settings for the encoder.
        valid: `(R, N)` bool, False for padding.
        options: Which variant of the method.
    """
    device = images[0].saliency.device
    if options == PAPER:
        signals = kernels.run(device, lambda: _by_kernels(images, profile, valid))
        if signals is not None:
            return signals
    with full_precision(device):
        return _joined(
            [
                _analyze_rows(images[rows], None if valid is None else valid[rows], profile)
                for rows in _row_chunks(len(images), device)
            ]
        )


def _row_chunks(num_rows: int, device: torch.device) -> list[slice]:
    """Rows that are handled together."""
    step = min(_ROWS_AT_ONCE.get(device.type, num_rows), num_rows)
    return [slice(start, start + step) for start in range(0, num_rows, step)]


def _by_kernels(
    images: Sequence[TokenSignals], profile: EncoderProfile, valid: Tensor | None
) -> ImageSignals:
    from msdg_vllm.core.kernels import analysis  # loads Triton

    return analysis.analyze_tokens(images, profile, valid)


def _analyze_rows(
    rows: Sequence[TokenSignals], valid: Tensor | None, profile: EncoderProfile
) -> ImageSignals:
    """`analyze_tokens` for rows that are handled together."""
    # Line 1.
    activation = torch.stack([row.activation for row in rows])  # (R, N)
    sink_mask = activation > profile.sink_threshold
    candidates = ~sink_mask
    if valid is not None:
        sink_mask, candidates = sink_mask & valid, candidates & valid
    num_candidates = candidates.sum(dim=-1)
    directions = [row.directions for row in rows if row.directions is not None]
    if directions:
        max_groups = min(profile.num_groups, candidates.shape[-1])
        any_moved = (torch.stack([row.moved for row in rows]) & candidates).any(dim=-1)
        num_groups = torch.where(any_moved, max_groups, 1).minimum(num_candidates)
        groups = group_tokens(directions, candidates, num_groups, max_groups, profile.seed)
    else:
        max_groups = 1
        num_groups = num_candidates.clamp_max(1)
        groups = torch.where(candidates, 0, -1)
    return ImageSignals(
        saliency=torch.stack([row.saliency for row in rows]),
        groups=groups,
        num_groups=num_groups,
        sink_mask=sink_mask,
        sink_activation=activation,
        max_groups=max_groups,
    )


def _joined(parts: Sequence[ImageSignals]) -> ImageSignals:
    """The rows of all parts."""
    if len(parts) == 1:
        return parts[0]
    return ImageSignals(
        saliency=torch.cat([part.saliency for part in parts]),
        groups=torch.cat([part.groups for part in parts]),
        num_groups=torch.cat([part.num_groups for part in parts]),
        sink_mask=torch.cat([part.sink_mask for part in parts]),
        sink_activation=torch.cat([part.sink_activation for part in parts]),
        max_groups=parts[0].max_groups,
    )


def _first_coordinates(states: Mapping[int, Tensor], layers: tuple[int, ...]) -> list[Tensor]:
    """The first coordinate of each state needed, `(.., P)`, or a `ShapeError`."""
    if missing := sorted(set(layers) - states.keys()):
        raise ShapeError(f"states of layers {missing} are missing; needed are {list(layers)}")
    shapes = sorted({tuple(states[layer].shape) for layer in layers})
    if len(shapes) > 1 or any(len(shape) < 2 or 0 in shape for shape in shapes):
        raise ShapeError(f"states must have one shape (.., N, d) and not be empty, got {shapes}")
    return [states[layer][..., 0] for layer in layers]


def _check_shapes(
    per_patch: Sequence[Tensor], patches_per_token: int
) -> tuple[tuple[int, ...], int]:
    """Return the leading dimensions and N, or raise a `ShapeError`."""
    shapes = sorted({tuple(values.shape) for values in per_patch})
    if len(shapes) > 1 or 0 in shapes[0]:
        raise ShapeError(f"saliency must have one value per patch of the states, got {shapes}")
    *lead, num_patches = shapes[0]
    if patches_per_token < 1 or num_patches % patches_per_token:
        raise ShapeError(
            f"patches_per_token must divide the number of patches, {num_patches}, "
            f"got {patches_per_token}"
        )
    return tuple(lead), num_patches // patches_per_token


def _check_sink_coordinate(profile: EncoderProfile, width: int) -> None:
    if profile.sink_coordinate is not None and profile.sink_coordinate >= width:
        raise ShapeError(
            f"sink_coordinate must be below the width of the states, {width}, "
            f"got {profile.sink_coordinate}; use the profile of this encoder"
        )

"""The signals of tokens while the encoder still runs: a state is read, reduced, and let go."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from msdg_vllm.core import kernels
from msdg_vllm.core.options import PAPER, SelectionOptions
from msdg_vllm.core.profiles import EncoderProfile
from msdg_vllm.core.signals import divisors, full_precision, row_norms, unit, unit_

Result = TypeVar("Result")

# Patches that are reduced together: few, so that what float32 takes of a state is small, and in
# the cache of a CPU. The bits of a token do not depend on it.
_PATCHES_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class TokenSignals:
    """What the states of images say about each token by itself.

    Attributes:
        saliency: u, `(.., N)` float32; 0 where a token is not finite.
        activation: Absolute value at the sink coordinate, `(.., N)` float32, or 0 without the
            sink filter; infinite for a token with a state, or the norm of a state, that is not
            finite.
        directions: `(.., N, d)` float32, unit norm or zero where the token is finite; None
            without grouping.
        moved: `(.., N)` bool, True where the token is finite and its direction, if any, is not
            zero.
    """

    saliency: Tensor
    activation: Tensor
    directions: Tensor | None
    moved: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> "TokenSignals":
        """Return the signals with `function` applied to each tensor."""
        return TokenSignals(
            saliency=function(self.saliency),
            activation=function(self.activation),
            directions=None if self.directions is None else function(self.directions),
            moved=function(self.moved),
        )


class TokenStream:
    """Reduces the states of R images of one size to the signals of their tokens, as they come.

    Held at any time are at most the early state of the direction and the state that the saliency
    window is measured from; beside them a few patches in float32. (A profile whose direction ends
    before its window or its sinks has the late state held as well.)

    Per patch first, then merged to tokens: of the patches of a token the saliency and the
    direction are averaged, the latter renormalised; one sink among them, or one value that is not
    finite, decides for all. The bits of a token do not depend on the others.
    """

    def __init__(
        self,
        profile: EncoderProfile,
        patches_per_token: int = 1,
        *,
        options: SelectionOptions = PAPER,
        order: Tensor | None = None,
        copies: bool = False,
    ) -> None:
        """Expect the states of `options.layers(profile)`.

        Args:
            profile: The settings for the encoder.
            patches_per_token: How many encoder patches merge into one token.
            options: Which variant of the method.
            order: `(P,)` int64, where the encoder has each patch, so that those of a token become
                neighbours and tokens come in their own order; None: they do already.
            copies: Copy the states that are held, for encoders that overwrite theirs.
        """
        self.layers = options.layers(profile)
        self._profile, self._options, self._order = profile, options, order
        self._patches, self._copies = patches_per_token, copies
        self._sinks = profile.sink_state if options.sink_filter else None
        self._steps = _saliency_steps(profile, options)
        self._ends = _direction_ends(profile, options)
        # Directions come last: they settle what is finite.
        reads = [*(after for _, after in self._steps), *self._ends]
        reads += [] if self._sinks is None else [self._sinks]
        self._turn_layer = max(reads) if self._ends else None
        self._held: dict[int, Tensor] = {}
        self._device = torch.device("cpu")
        self._shape = (0, 0)
        self._lengths: Tensor | None = None  # (R, P)
        self._saliency: Tensor | None = None  # (R, N), by kernels
        self._activation: Tensor | None = None
        self._turned: tuple[Tensor, Tensor, Tensor] | None = None
        self._settled: TokenSignals | None = None

    def take(self, layer: int, state: Tensor) -> None:
        """Read the state that enters a layer, `(R, P, d)`; layers come in ascending order."""
        num_patches = state.shape[1] if self._order is None else len(self._order)
        self._shape, self._device = (state.shape[0], num_patches), state.device
        at_hand = {**self._held, layer: state}
        with torch.no_grad(), full_precision(state.device):
            if layer == self._sinks:
                self._read_sinks(state)
            for before, after in self._steps:
                if after == layer:
                    self._measure(at_hand[before], state)
            if layer == self._turn_layer:
                self._turn(at_hand)
        if self._copies and self._last_read(layer) > layer:
            at_hand[layer] = state.clone()
        self._held = {n: held for n, held in at_hand.items() if self._last_read(n) > layer}

    def finish(self, saliency: Tensor | None = None) -> TokenSignals:
        """Return the signals, `(R, N)`; `saliency` is that of the option `given`, `(R, P)`."""
        if saliency is not None:
            self._lengths, self._shape = saliency.float(), (saliency.shape[0], saliency.shape[1])
            self._device = saliency.device
        if self._settled is None:
            with torch.no_grad():
                self._settled = self._settle()
        return self._settled

    def _last_read(self, layer: int) -> int:
        """The last layer at which a state is wanted."""
        reads = [after for before, after in self._steps if before == layer]
        if layer in self._ends and self._turn_layer is not None:
            reads.append(self._turn_layer)
        return max(reads, default=-1)

    def _by_kernels(self, run: Callable[[Any], Result]) -> Result | None:
        if self._options != PAPER:
            return None

        def with_triton() -> Result:
            from msdg_vllm.core.kernels import signals  # loads Triton

            return run(signals)

        return kernels.run(self._device, with_triton)

    def _per_token(self, function: Callable[..., Tensor], *states: Tensor) -> Tensor:
        """`function` of the float32 states of a few patches, then of the next, `(R, ..)`."""
        rows = [
            torch.cat([function(*part) for part in self._parts(row)])
            for row in zip(*states, strict=True)
        ]
        return torch.stack(rows)

    def _parts(self, states: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """The states of one image, `(P, d)` each, some tokens at a time, in the order of tokens."""
        step = max(1, _PATCHES_AT_ONCE // self._patches) * self._patches
        for start in range(0, self._shape[1], step):
            here: slice | Tensor = slice(start, start + step)
            if self._order is not None:
                here = self._order[here]
            yield [state[here].float() for state in states]

    def _read_sinks(self, state: Tensor) -> None:
        """Line 1: the absolute value at the sink coordinate."""
        coordinate = self._profile.sink_coordinate
        assert coordinate is not None
        self._activation = self._by_kernels(
            lambda run: run.activation(state, coordinate, self._patches, self._order)
        )
        if self._activation is None:

            def activation(x: Tensor) -> Tensor:
                value = torch.where(row_norms(x).isfinite(), x[:, coordinate].abs(), torch.inf)
                return value.view(-1, self._patches).amax(dim=-1)

            self._activation = self._per_token(activation, state)

    def _measure(self, before: Tensor, after: Tensor) -> None:
        """Line 4: how far each patch moved."""
        self._saliency = self._by_kernels(
            lambda run: run.saliency(
                before, after, self._profile.saliency_scale, self._patches, self._order
            )
        )
        if self._saliency is None:
            lengths = self._per_token(lambda x, y: row_norms(y - x), before, after)
            self._lengths = lengths if self._lengths is None else self._lengths + lengths

    def _turn(self, states: Mapping[int, Tensor]) -> None:
        """Line 3, Eq. 1: unit directions of tokens."""
        ends = [states[layer] for layer in self._ends]
        rows, num_patches = self._shape
        self._settled = self._by_kernels(
            lambda run: run.directions(
                ends, self._merged_saliency(), self._known_activation(), self._patches, self._order
            )
        )
        if self._settled is not None:
            return
        num_tokens, width = num_patches // self._patches, ends[0].shape[-1]
        directions = torch.empty(rows, num_tokens, width, device=self._device)
        finite, moved = [], []
        for row, images in enumerate(zip(*ends, strict=True)):
            start = 0
            for part in self._parts(images):
                direction, is_finite = _displacements(*part)
                if self._patches > 1:
                    direction = unit_(direction, row_norms(direction))
                    direction = _mean_over_patches(direction, self._patches)
                norms = row_norms(direction)
                here = slice(start, start := start + len(direction))
                torch.div(direction, divisors(norms), out=directions[row, here])
                finite.append(is_finite.view(-1, self._patches).all(dim=-1))
                moved.append(norms > 0)
        shape = rows, num_tokens
        self._turned = directions, torch.cat(finite).view(shape), torch.cat(moved).view(shape)

    def _merged_saliency(self) -> Tensor:
        """u of each token, `(R, N)`; not finite where a patch's is not."""
        if self._saliency is not None:
            return self._saliency
        lengths = self._lengths
        if lengths is None:  # no window
            lengths = torch.ones(self._shape, device=self._device)
        if self._profile.saliency_scale != 1:
            lengths = lengths * self._profile.saliency_scale
        if self._patches == 1:
            return lengths
        return torch.stack([_mean_over_patches(row, self._patches) for row in lengths])

    def _known_activation(self) -> Tensor:
        if self._activation is not None:
            return self._activation
        rows, num_patches = self._shape
        return torch.zeros(rows, num_patches // self._patches, device=self._device)

    def _settle(self) -> TokenSignals:
        """One value that is not finite decides for a token."""
        saliency, activation = self._merged_saliency(), self._known_activation()
        finite = saliency.isfinite() & activation.isfinite()
        directions, moved = None, finite
        if self._turned is not None:
            directions, finite_directions, turned = self._turned
            finite = finite & finite_directions
            moved = finite & turned
        return TokenSignals(
            saliency=torch.where(finite, saliency, 0.0),
            activation=torch.where(finite, activation, torch.inf),
            directions=directions,
            moved=moved,
        )


def token_signals(
    states: Mapping[int, Tensor],
    profile: EncoderProfile,
    patches_per_token: int = 1,
    saliency: Tensor | None = None,
    options: SelectionOptions = PAPER,
) -> TokenSignals:
    """Return the signals of the tokens of R images whose states, `(R, P, d)`, are all at hand."""
    stream = TokenStream(profile, patches_per_token, options=options)
    for layer in stream.layers:
        stream.take(layer, states[layer])
    return stream.finish(saliency)


def _saliency_steps(
    profile: EncoderProfile, options: SelectionOptions
) -> tuple[tuple[int, int], ...]:
    """The pairs of states between which lengths are measured."""
    if options.saliency == "given" or profile.saliency_window is None:
        return ()
    if options.saliency == "endpoint":
        return (profile.saliency_window,)
    start, end = profile.saliency_window
    return tuple(pairwise(range(start, end + 1)))


def _direction_ends(profile: EncoderProfile, options: SelectionOptions) -> tuple[int, ...]:
    """The states that directions are made of: two, one for output features, none without groups."""
    grouping = options.grouping_of(profile)
    if grouping == "none":
        return ()
    return (profile.features_layer,) if grouping == "output" else profile.direction_layers


def _displacements(*ends: Tensor) -> tuple[Tensor, Tensor]:
    """Displacements yet to be normalised, `(P, d)`, and where they are finite, `(P,)`."""
    late = ends[-1]
    late_norms = row_norms(late)
    displacement, finite = unit(late, late_norms), late_norms.isfinite()
    if len(ends) == 1:  # output features stand for themselves
        return displacement, finite
    early_norms = row_norms(ends[0])
    displacement.addcdiv_(ends[0], divisors(early_norms), value=-1)
    return displacement, finite & early_norms.isfinite()


def _mean_over_patches(values: Tensor, patches_per_token: int) -> Tensor:
    """Mean over each run of patches along dimension 0, added up in a fixed order."""
    total = values[0::patches_per_token] + values[1::patches_per_token]
    for patch in range(2, patches_per_token):
        total += values[patch::patches_per_token]
    return total.div_(patches_per_token)

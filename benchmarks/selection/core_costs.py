"""What the two halves of MSDG-Prune cost, analysis and selection."""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.selection.peak_memory import PeakMemory
from benchmarks.selection.yardstick import (
    ENCODER_WIDTH,
    LLM_WIDTH,
    NUM_QUERY_TOKENS,
    RETENTION,
    encoder_layer,
    milliseconds,
)
from msdg_vllm.core import ImageSignals, analyze_image, num_kept_tokens, select_tokens
from msdg_vllm.core.profiles import EncoderProfile, built_in_profile

GOAL_BOTH, GOAL_SELECTION = 0.07, 0.015
SHORT, LONG, GOAL_LONG = 1024, 16384, 1.3
# Directions of so few dimensions keep k-means busy for all its rounds at any number of tokens;
# those of the encoder's width are all but orthogonal, and 576 of them settle in the first.
_FEW_DIMENSIONS = 8


@dataclass(frozen=True)
class Cost:
    """Medians over all rounds for one shape; ratios are to the encoder layer."""

    num_images: int
    num_tokens: int
    budget: int
    layer_ms: float
    analysis_ms: float
    selection_ms: float
    ratio_both: float
    ratio_all_rounds: float  # the same where grouping takes all its rounds
    ratio_selection: float
    analysis_peak_mib: float
    selection_peak_mib: float
    states_mib: float  # what analysis is given, for scale


@dataclass(frozen=True)
class _Images:
    """Images of one size, a question, and what is asked of the core."""

    profile: EncoderProfile
    states: dict[int, Tensor]
    visual: Tensor
    query: Tensor
    budget: int
    signals: ImageSignals

    @classmethod
    def random(cls, num_images: int, num_tokens: int, rank: int = ENCODER_WIDTH) -> "_Images":
        generator = torch.Generator().manual_seed(0)
        profile = built_in_profile("clip-vit-large-patch14-336")

        def values(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        states = {n: values(num_images, num_tokens, rank) for n in profile.layers}
        if rank < ENCODER_WIDTH:
            basis = values(rank, ENCODER_WIDTH) / rank**0.5
            states = {n: state @ basis for n, state in states.items()}
        return cls(
            profile=profile,
            states=states,
            visual=values(num_images, num_tokens, LLM_WIDTH),
            query=values(NUM_QUERY_TOKENS, LLM_WIDTH),
            budget=num_kept_tokens(num_tokens, RETENTION),
            signals=analyze_image(states, profile),
        )

    def analyze(self) -> ImageSignals:
        return analyze_image(self.states, self.profile)

    def select(self) -> Tensor:
        return select_tokens(self.signals, self.visual, self.query, self.budget)


@dataclass(frozen=True)
class LongCost:
    """Processor time of a token in a short and in a long image, both halves together."""

    short_us: float
    long_us: float
    ratio: float

    def __str__(self) -> str:
        return (
            f"A token costs {self.long_us:.1f} us in an image of {LONG:,} and {self.short_us:.1f} "
            f"in one of {SHORT:,}: {self.ratio:.2f} times (goal: <= {GOAL_LONG})"
        )


@torch.inference_mode()
def measure_long(num_rounds: int) -> LongCost:
    """Time a short and a long image in turn; the ratio is the median of ratios within a round.

    Both are grouped in all rounds: otherwise the ratio would tell which settles first.
    """
    short, long = (_Images.random(1, size, _FEW_DIMENSIONS) for size in (SHORT, LONG))

    def microseconds(images: _Images, num_tokens: int) -> float:
        both = milliseconds(images.analyze) + milliseconds(images.select)
        return 1e3 * both / num_tokens

    rounds = [
        (microseconds(short, SHORT), microseconds(long, LONG)) for _ in range(num_rounds + 1)
    ][1:]
    return LongCost(
        short_us=statistics.median(s for s, _ in rounds),
        long_us=statistics.median(n for _, n in rounds),
        ratio=statistics.median(n / s for s, n in rounds),
    )


@torch.inference_mode()
def measure(num_images: int, num_tokens: int, num_rounds: int) -> Cost:
    """Time one shape."""
    images = _Images.random(num_images, num_tokens)
    restless = _Images.random(num_images, num_tokens, _FEW_DIMENSIONS)
    states, budget = images.states, images.budget
    layer = encoder_layer()
    actions: tuple[Callable[[], object], ...] = (
        lambda: layer(states[2]),
        images.analyze,
        images.select,
        restless.analyze,
    )
    for action in actions:
        action()
    rounds = []
    for number in range(num_rounds):
        rounds.append([milliseconds(action) for action in actions])
        progress = f"{num_images} x {num_tokens}: round {number + 1} of {num_rounds}"
        print(f"\r{progress}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)

    with PeakMemory(states) as analysis_memory:
        actions[1]()
    with PeakMemory(images.visual, images.query, _fields(images.signals)) as selection_memory:
        actions[2]()
    layer_ms, analysis_ms, selection_ms, _ = map(list, zip(*rounds, strict=True))
    return Cost(
        num_images=num_images,
        num_tokens=num_tokens,
        budget=budget,
        layer_ms=statistics.median(layer_ms),
        analysis_ms=statistics.median(analysis_ms),
        selection_ms=statistics.median(selection_ms),
        ratio_both=statistics.median((a + s) / one for one, a, s, _ in rounds),
        ratio_all_rounds=statistics.median((a + s) / one for one, _, s, a in rounds),
        ratio_selection=statistics.median(s / one for one, _, s, _ in rounds),
        analysis_peak_mib=analysis_memory.peak / 2**20,
        selection_peak_mib=selection_memory.peak / 2**20,
        states_mib=sum(state.nbytes for state in states.values()) / 2**20,
    )


def _fields(signals: ImageSignals) -> list[Tensor]:
    return [
        value for name in signals.__slots__ if isinstance(value := getattr(signals, name), Tensor)
    ]


def table(costs: list[Cost]) -> str:
    """The costs as a Markdown table."""
    rows = [
        "| images x tokens | kept | layer | analysis | selection | both / layer | with all rounds "
        "| selection / layer | extra memory, analysis | selection |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows += [
        f"| {c.num_images} x {c.num_tokens} | {c.budget} | {c.layer_ms:.0f} ms "
        f"| {c.analysis_ms:.1f} ms | {c.selection_ms:.1f} ms | {c.ratio_both:.1%} "
        f"| {c.ratio_all_rounds:.1%} | {c.ratio_selection:.1%} | {c.analysis_peak_mib:.1f} MiB "
        f"| {c.selection_peak_mib:.1f} MiB |"
        for c in costs
    ]
    rows.append(f"| goal | | | | | <= {GOAL_BOTH:.0%} | | <= {GOAL_SELECTION:.1%} | | |")
    return "\n".join(rows)

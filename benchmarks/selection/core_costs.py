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
from msdg_vllm.core.profiles import built_in_profile

GOAL_BOTH, GOAL_SELECTION = 0.07, 0.015


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
    ratio_selection: float
    analysis_peak_mib: float
    selection_peak_mib: float
    states_mib: float  # what analysis is given, for scale


@torch.inference_mode()
def measure(num_images: int, num_tokens: int, num_rounds: int) -> Cost:
    """Time one shape."""
    generator = torch.Generator().manual_seed(0)
    profile = built_in_profile("clip-vit-large-patch14-336")
    shape = (num_images, num_tokens)
    states = {n: torch.randn(*shape, ENCODER_WIDTH, generator=generator) for n in profile.layers}
    visual = torch.randn(*shape, LLM_WIDTH, generator=generator)
    query = torch.randn(NUM_QUERY_TOKENS, LLM_WIDTH, generator=generator)
    budget = num_kept_tokens(num_tokens, RETENTION)
    signals = analyze_image(states, profile)
    layer = encoder_layer()
    actions: tuple[Callable[[], object], ...] = (
        lambda: layer(states[2]),
        lambda: analyze_image(states, profile),
        lambda: select_tokens(signals, visual, query, budget),
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
    with PeakMemory(visual, query, _fields(signals)) as selection_memory:
        actions[2]()
    layer_ms, analysis_ms, selection_ms = map(list, zip(*rounds, strict=True))
    both = [(a + s) / one for one, a, s in rounds]
    return Cost(
        num_images=num_images,
        num_tokens=num_tokens,
        budget=budget,
        layer_ms=statistics.median(layer_ms),
        analysis_ms=statistics.median(analysis_ms),
        selection_ms=statistics.median(selection_ms),
        ratio_both=statistics.median(both),
        ratio_selection=statistics.median(s / one for one, _, s in rounds),
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
        "| images x tokens | kept | layer | analysis | selection | both / layer "
        "| selection / layer | extra memory, analysis | selection |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows += [
        f"| {c.num_images} x {c.num_tokens} | {c.budget} | {c.layer_ms:.0f} ms "
        f"| {c.analysis_ms:.1f} ms | {c.selection_ms:.1f} ms | {c.ratio_both:.1%} "
        f"| {c.ratio_selection:.1%} | {c.analysis_peak_mib:.1f} MiB "
        f"| {c.selection_peak_mib:.1f} MiB |"
        for c in costs
    ]
    rows.append(f"| goal | | | | | <= {GOAL_BOTH:.0%} | <= {GOAL_SELECTION:.1%} | | |")
    return "\n".join(rows)

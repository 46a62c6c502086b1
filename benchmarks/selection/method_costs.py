"""What each method costs behind the call that all of them share."""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.selection.peak_memory import PeakMemory
from benchmarks.selection.yardstick import (
    ENCODER_WIDTH,
    HEAD_WIDTH,
    LLM_WIDTH,
    NUM_HEADS,
    NUM_QUERY_TOKENS,
    RETENTION,
    encoder_layer,
    milliseconds,
)
from msdg_vllm.core import num_kept_tokens
from msdg_vllm.core.profiles import built_in_profile
from msdg_vllm.methods import METHODS, Encoder, Image, Needs, Question, Signals, method_named


@dataclass(frozen=True)
class MethodCost:
    """Medians over all rounds for one method and one shape; the ratio is to the encoder layer."""

    method: str
    num_images: int
    num_tokens: int
    budget: int
    reading_ms: float  # attention, keys and update norms, from what passes through the encoder
    choosing_ms: float
    ratio: float  # of both
    peak_mib: float  # of choosing
    states_mib: float  # states of the encoder that are held until then


@torch.inference_mode()
def measure_methods(num_images: int, num_tokens: int, num_rounds: int) -> list[MethodCost]:
    """Time every method on one shape."""
    images = _make_images(num_images, num_tokens)
    encoder, signals = images[0].encoder, [image.signals for image in images]
    query = torch.randn(NUM_QUERY_TOKENS, LLM_WIDTH)
    budget = num_kept_tokens(num_tokens, RETENTION)
    layer = encoder_layer()
    questions = [Question(budget, query)] * num_images
    state = torch.stack([one.states[2] for one in signals])
    reading = {
        name: _reading(method_named(name).needs(encoder), num_images, num_tokens)
        for name in METHODS
    }

    def selecting(name: str) -> Callable[[], object]:
        method = method_named(name)
        return lambda: method.select_all(method.analyze(images), questions)

    actions = {name: (reading[name], selecting(name)) for name in METHODS}
    layer_ms: list[float] = []
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in METHODS}
    for number in range(num_rounds + 1):
        layer_ms.append(milliseconds(lambda: layer(state)))
        for name, (read, select) in actions.items():
            times[name].append((milliseconds(read), milliseconds(select)))
            progress = f"{num_images} x {num_tokens}: round {number} of {num_rounds}, {name:20}"
            print(f"\r{progress}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)

    inputs = [getattr(one, name) for one in signals for name in one.__slots__]
    costs = []
    for name, (_, select) in actions.items():
        # The first round only warms up.
        rounds = list(zip(layer_ms, times[name], strict=True))[1:]
        needed = method_named(name).needs(encoder).states
        with PeakMemory(query, *(image.visual for image in images), *inputs) as memory:
            select()
        costs.append(
            MethodCost(
                method=name,
                num_images=num_images,
                num_tokens=num_tokens,
                budget=budget,
                reading_ms=statistics.median(read for _, (read, _) in rounds),
                choosing_ms=statistics.median(chosen for _, (_, chosen) in rounds),
                ratio=statistics.median((read + chosen) / one for one, (read, chosen) in rounds),
                peak_mib=memory.peak / 2**20,
                states_mib=sum(one.states[n].nbytes for one in signals for n in needed) / 2**20,
            )
        )
    return costs


def _make_images(num_images: int, num_tokens: int) -> list[Image]:
    """Random images with every signal that a method reads."""
    encoder = Encoder(num_layers=23, profile=built_in_profile("clip-vit-large-patch14-336"))
    needs = Needs()
    for name in METHODS:
        needs = needs | method_named(name).needs(encoder)
    generator = torch.Generator().manual_seed(0)

    def tokens(*shape: int) -> Tensor:
        return torch.randn(num_tokens, *shape, generator=generator)

    project = torch.nn.Sequential(
        torch.nn.Linear(ENCODER_WIDTH, LLM_WIDTH),
        torch.nn.GELU(),
        torch.nn.Linear(LLM_WIDTH, LLM_WIDTH),
    )
    return [
        Image(
            signals=Signals(
                states={n: tokens(ENCODER_WIDTH) for n in (*needs.states, *needs.token_signals)},
                features=tokens(ENCODER_WIDTH),
                class_attention={n: tokens().abs() for n in needs.class_attention},
                received_attention={n: tokens().abs() for n in needs.received_attention},
                keys={n: tokens(HEAD_WIDTH) for n in needs.keys},
                mlp_updates={n: tokens().abs() for n in needs.mlp_updates},
            ),
            visual=tokens(LLM_WIDTH),
            encoder=encoder,
            grids=((num_tokens // 24, 24),),
            seed=seed,
            project=project,
        )
        for seed in range(num_images)
    ]


def _reading(needs: Needs, num_images: int, num_tokens: int) -> Callable[[], object]:
    """What the engine computes for a method beside the encoder's own work."""
    from msdg_vllm.engine.worker.attention import class_attention, received_attention  # loads vLLM

    # The class token looks and is looked at too.
    num_tokens += 1
    query, key = torch.randn(2, num_images, num_tokens, NUM_HEADS, HEAD_WIDTH)
    update = torch.randn(num_images, num_tokens, ENCODER_WIDTH)
    scale = HEAD_WIDTH**-0.5

    def read() -> None:
        for _ in needs.class_attention:
            class_attention(query, key, scale)
        for _ in needs.received_attention:
            received_attention(query, key, scale, [(0, num_tokens)])
        for _ in needs.keys:
            key.float().sum(dim=2)
        for _ in needs.mlp_updates:
            torch.linalg.vector_norm(update, dim=-1)

    return read


def method_table(costs: list[MethodCost]) -> str:
    """The costs of all methods as a Markdown table."""
    rows = [
        "| method | images x tokens | reading | choosing | both / layer | extra memory "
        "| states held |",
        "|---|---|---|---|---|---|---|",
    ]
    rows += [
        f"| {c.method} | {c.num_images} x {c.num_tokens} | {c.reading_ms:.1f} ms "
        f"| {c.choosing_ms:.1f} ms | {c.ratio:.1%} | {c.peak_mib:.1f} MiB "
        f"| {c.states_mib:.0f} MiB |"
        for c in costs
    ]
    return "\n".join(rows)

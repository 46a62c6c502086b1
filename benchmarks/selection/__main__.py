"""What selection costs, beside one encoder layer of the same shape in the same process.

    python -m benchmarks.selection

Prints two tables, the two halves of MSDG-Prune and all methods behind one call, and writes the
numbers to benchmarks/results/selection.json. Every round times the layer and all that is compared
with it one after the other, so that all see the same machine; ratios are medians over the rounds
of ratios within a round. Times are processor time, which other processes disturb least.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.selection.peak_memory import PeakMemory
from benchmarks.shared.provenance import RESULTS, processor_name
from msdg_vllm.core import ImageSignals, analyze_image, num_kept_tokens, select_tokens
from msdg_vllm.core.profiles import built_in_profile
from msdg_vllm.methods import METHODS, Encoder, Image, Needs, Question, Signals, method_named

OUTPUT = RESULTS / "selection.json"
# CLIP-ViT-L/14-336 in front of a 7B language model, a short question.
ENCODER_WIDTH, LLM_WIDTH, NUM_QUERY_TOKENS, RETENTION = 1024, 4096, 16, 0.111
NUM_HEADS, HEAD_WIDTH = 16, 64
# One image, the five tiles of LLaVA-NeXT, and the same five as one image.
SHAPES = ((1, 576), (5, 576), (1, 2880))
GOAL_BOTH, GOAL_SELECTION = 0.10, 0.02


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


def encoder_layer() -> Callable[[Tensor], object]:
    """One CLIP-ViT-L layer with random weights, as Hugging Face transformers runs it."""
    from transformers import CLIPVisionConfig
    from transformers.models.clip.modeling_clip import CLIPEncoderLayer

    config = CLIPVisionConfig(
        hidden_size=ENCODER_WIDTH,
        intermediate_size=4 * ENCODER_WIDTH,
        num_attention_heads=NUM_HEADS,
    )
    config._attn_implementation = "sdpa"
    layer = CLIPEncoderLayer(config).eval()
    return lambda states: layer(states, attention_mask=None)


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
        rounds.append([_milliseconds(action) for action in actions])
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
        layer_ms.append(_milliseconds(lambda: layer(state)))
        for name, (read, select) in actions.items():
            times[name].append((_milliseconds(read), _milliseconds(select)))
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
                states={n: tokens(ENCODER_WIDTH) for n in needs.states},
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


def _fields(signals: ImageSignals) -> list[Tensor]:
    return [
        value for name in signals.__slots__ if isinstance(value := getattr(signals, name), Tensor)
    ]


def _milliseconds(action: Callable[[], object]) -> float:
    start = time.process_time()
    action()
    return (time.process_time() - start) * 1e3


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
    rows.append(f"| goal | | | | | <= {GOAL_BOTH:.0%} | <= {GOAL_SELECTION:.0%} | | |")
    return "\n".join(rows)


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


def main() -> None:
    """Measure all shapes, print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        description="Time selection, ours and others, beside one CLIP-ViT-L encoder layer."
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds per shape (default: 15)")
    parser.add_argument(
        "--method-rounds",
        type=int,
        default=5,
        help="rounds per shape of all methods (default: 5)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=OUTPUT,
        help="where to write the JSON (default: %(default)s)",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    costs = [measure(*shape, arguments.rounds) for shape in SHAPES]
    methods = [cost for s in SHAPES for cost in measure_methods(*s, arguments.method_rounds)]
    print(table(costs))
    print()
    print(method_table(methods))
    report = {
        "command": "python -m benchmarks.selection "
        f"--threads {arguments.threads} --rounds {arguments.rounds} "
        f"--method-rounds {arguments.method_rounds}",
        "processor": processor_name(),
        "threads": arguments.threads,
        "torch": torch.__version__,
        "dtype": "float32",
        "encoder_width": ENCODER_WIDTH,
        "llm_width": LLM_WIDTH,
        "num_query_tokens": NUM_QUERY_TOKENS,
        "retention": RETENTION,
        "costs": [asdict(cost) for cost in costs],
        "methods": [asdict(cost) for cost in methods],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

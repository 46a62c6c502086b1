"""What the selection core costs, beside one encoder layer of the same shape in the same process.

    python -m benchmarks.selection

Prints a table and writes the numbers to benchmarks/results/selection.json. Every round times the
layer, the analysis and the selection one after the other, so that all three see the same machine;
ratios are medians over the rounds of ratios within a round.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.provenance import processor_name
from msdg_vllm.core import ImageSignals, analyze_image, num_kept_tokens, select_tokens
from msdg_vllm.profiles import built_in_profile

RESULTS = Path(__file__).parent / "results" / "selection.json"
# CLIP-ViT-L/14-336 in front of a 7B language model, a short question.
ENCODER_WIDTH, LLM_WIDTH, NUM_QUERY_TOKENS, RETENTION = 1024, 4096, 16, 0.111
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


class PeakMemory(TorchDispatchMode):
    """Tracks the bytes of the tensors made inside the block that are alive at once.

    Attributes:
        peak: The most bytes alive at any time, inputs not counted.
    """

    def __init__(self, *inputs: object) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._inputs = {_storage(tensor).cdata for tensor in _tensors(inputs)}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        for tensor in _tensors(result):
            storage = _storage(tensor)
            if storage.cdata not in self._inputs:
                self._alive[storage.cdata] = storage, tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _tensors(tree: object) -> Iterator[Tensor]:
    yield from (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def encoder_layer() -> Callable[[Tensor], object]:
    """One CLIP-ViT-L layer with random weights, as Hugging Face transformers runs it."""
    from transformers import CLIPVisionConfig
    from transformers.models.clip.modeling_clip import CLIPEncoderLayer

    config = CLIPVisionConfig(
        hidden_size=ENCODER_WIDTH,
        intermediate_size=4 * ENCODER_WIDTH,
        num_attention_heads=16,
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


def _fields(signals: ImageSignals) -> list[Tensor]:
    return [
        value for name in signals.__slots__ if isinstance(value := getattr(signals, name), Tensor)
    ]


def _milliseconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1e3


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


def main() -> None:
    """Measure all shapes, print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        description="Time analysis and selection beside one CLIP-ViT-L encoder layer."
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds per shape (default: 15)")
    parser.add_argument(
        "--output",
        type=Path,
        default=RESULTS,
        help="where to write the JSON (default: %(default)s)",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    costs = [measure(*shape, arguments.rounds) for shape in SHAPES]
    print(table(costs))
    report = {
        "command": "python -m benchmarks.selection "
        f"--threads {arguments.threads} --rounds {arguments.rounds}",
        "processor": processor_name(),
        "threads": arguments.threads,
        "torch": torch.__version__,
        "dtype": "float32",
        "encoder_width": ENCODER_WIDTH,
        "llm_width": LLM_WIDTH,
        "num_query_tokens": NUM_QUERY_TOKENS,
        "retention": RETENTION,
        "costs": [asdict(cost) for cost in costs],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""What selection costs, beside one encoder layer of the same shape in the same process.

    python -m benchmarks.selection
    python -m benchmarks.selection --launches     # counts and estimates alone, in seconds
    python -m benchmarks.selection --memory       # what pruning adds to an encoder's memory

Prints three tables: launches on a device and what they would take, by count and estimate; then,
timed on this CPU, the two halves of MSDG-Prune, a long image beside a short one, and all methods
behind one call. Writes the numbers to benchmarks/results/selection.json. Every round times the
layer and all that is compared with it one after the other, so that all see the same machine;
ratios are medians over the rounds of ratios within a round. Times are processor time, which other
processes disturb least.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.selection.core_costs import measure, measure_long, table
from benchmarks.selection.encoder_memory import memory_table
from benchmarks.selection.launch_table import (
    as_json,
    launch_costs,
    launch_table,
    micro_batch_line,
)
from benchmarks.selection.method_costs import measure_methods, method_table
from benchmarks.selection.yardstick import ENCODER_WIDTH, LLM_WIDTH, NUM_QUERY_TOKENS, RETENTION
from benchmarks.shared.provenance import RESULTS, processor_name

OUTPUT = RESULTS / "selection.json"
# One image, the five tiles of LLaVA-NeXT, and the same five as one image.
SHAPES = ((1, 576), (5, 576), (1, 2880))


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
    parser.add_argument(
        "--launches",
        action="store_true",
        help="count launches on a device and estimate their time; time nothing",
    )
    parser.add_argument(
        "--memory",
        action="store_true",
        help="count the memory that pruning adds to an encoder's run; time nothing",
    )
    arguments = parser.parse_args()
    if arguments.memory:
        print(memory_table())
        return
    launches = launch_costs()
    print(launch_table(launches))
    print()
    if arguments.launches:
        print(micro_batch_line())
        return
    torch.set_num_threads(arguments.threads)
    costs = [measure(*shape, arguments.rounds) for shape in SHAPES]
    long_cost = measure_long(arguments.rounds)
    methods = [cost for s in SHAPES for cost in measure_methods(*s, arguments.method_rounds)]
    print(table(costs))
    print()
    print(long_cost)
    print()
    print(method_table(methods))
    print()
    print(micro_batch_line())
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
        "long_image": asdict(long_cost),
        "methods": [asdict(cost) for cost in methods],
        "launches": as_json(launches),
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""A LLaVA-1.5 of middle size with random weights, for measuring time where there is no GPU.

In a tiny model the language model costs nothing, so pruning cannot save anything; a real one is
too large for a small machine. This one keeps the shape of LLaVA-1.5 (a CLIP tower of 24 layers,
576 visual tokens, a Llama behind it) at widths that two cores can run, with a prefill that costs
several times as much as the tower. What it says means nothing.

    python -m benchmarks.serving.midsize build      # into benchmarks/runs/midsize-llava
    python -m benchmarks.serving.midsize compare    # its operations beside those of LLaVA-1.5-7B
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.shared.provenance import RUNS
from msdg_vllm.core import num_kept_tokens

FOLDER = RUNS / "midsize-llava"

# A short question with its chat template.
NUM_TEXT_TOKENS = 24
# Some twenty of the 576 tokens exceed it, as in a trained tower.
SINK_THRESHOLD = 2.5


@dataclass(frozen=True, slots=True)
class Proportions:
    """The sizes of a LLaVA-1.5; the defaults are those of the mid-size one."""

    image_size: int = 336
    patch_size: int = 14
    tower_layers: int = 24
    tower_width: int = 448
    llm_layers: int = 20
    llm_width: int = 1024
    llm_intermediate: int = 2816
    head_width: int = 64

    @property
    def num_visual_tokens(self) -> int:
        """Visual tokens of every image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def encoder_flops(self) -> int:
        """Floating-point operations of the tower for one image; the last layer never runs."""
        tokens = self.num_visual_tokens + 1
        weights = 12 * self.tower_width**2
        attention = 2 * tokens * self.tower_width
        return 2 * tokens * (weights + attention) * (self.tower_layers - 1)

    def prefill_flops(self, num_tokens: int) -> int:
        """Floating-point operations of the language model for a prompt; attention is causal."""
        weights = 4 * self.llm_width**2 + 3 * self.llm_width * self.llm_intermediate
        attention = num_tokens * self.llm_width
        return 2 * num_tokens * (weights + attention) * self.llm_layers


LLAVA_1_5_7B = Proportions(
    tower_width=1024, llm_layers=32, llm_width=4096, llm_intermediate=11008, head_width=128
)
MIDSIZE = Proportions()


def build(folder: Path = FOLDER, proportions: Proportions = MIDSIZE) -> Path:
    """Write the checkpoint, unless the folder holds one of the same proportions already."""
    stamp = folder / "proportions.json"
    wanted = asdict(proportions)
    if stamp.is_file() and json.loads(stamp.read_text()) == wanted:
        return folder
    import torch

    from examples.miniature import make_llava, write_profile

    make_llava(
        folder,
        image_size=proportions.image_size,
        vision={
            "hidden_size": proportions.tower_width,
            "intermediate_size": 4 * proportions.tower_width,
            "num_hidden_layers": proportions.tower_layers,
            "num_attention_heads": proportions.tower_width // 64,
            "patch_size": proportions.patch_size,
            "projection_dim": proportions.tower_width,
            "initializer_factor": 1.0,
        },
        text={
            "hidden_size": proportions.llm_width,
            "intermediate_size": proportions.llm_intermediate,
            "num_hidden_layers": proportions.llm_layers,
            "num_attention_heads": proportions.llm_width // proportions.head_width,
            "num_key_value_heads": proportions.llm_width // proportions.head_width,
            "initializer_range": 0.02,
        },
        dtype=torch.bfloat16,
    )
    write_profile(folder, sink_threshold=SINK_THRESHOLD)
    stamp.write_text(json.dumps(wanted))
    return folder


def comparison(retentions: Sequence[float] = (1.0, 0.333, 0.222, 0.111, 0.056)) -> str:
    """Return operations until the first token, by retention, of this model and of the real one."""
    names = {"mid-size": MIDSIZE, "LLaVA-1.5-7B": LLAVA_1_5_7B}
    rows = [
        f"| | {' | '.join(f'{name}: encoder + prefill' for name in names)} | "
        + " | ".join(f"{name}: of retention 1" for name in names)
        + " |",
        "|---" * (1 + 2 * len(names)) + "|",
    ]
    for retention in retentions:
        sums, shares = [], []
        for sizes in names.values():
            budget = num_kept_tokens(sizes.num_visual_tokens, retention)
            prefill = sizes.prefill_flops(budget + NUM_TEXT_TOKENS)
            whole = sizes.prefill_flops(sizes.num_visual_tokens + NUM_TEXT_TOKENS)
            sums.append(f"{sizes.encoder_flops / 1e9:,.0f} + {prefill / 1e9:,.0f} GFLOP")
            shares.append(f"{(sizes.encoder_flops + prefill) / (sizes.encoder_flops + whole):.0%}")
        rows.append(f"| retention {retention:g} | {' | '.join(sums + shares)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.midsize", description=(__doc__ or "").split("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("build", help="write the checkpoint")
    make.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="default: %(default)s")
    commands.add_parser("compare", help="operations until the first token, beside LLaVA-1.5-7B")
    arguments = parser.parse_args()
    print(comparison() if arguments.command == "compare" else build(arguments.folder))


if __name__ == "__main__":
    main()

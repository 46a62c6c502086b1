"""A LLaVA-1.5 of middle size with random weights, for measuring time where there is no GPU.

In a tiny model the language model costs nothing, so pruning cannot save anything; a real one is
too large for a small machine. This one keeps the shape of LLaVA-1.5 (a CLIP tower of 24 layers,
576 visual tokens, a Llama behind it) at widths that two cores can run, with a prefill that costs
several times as much as the tower. What it says means nothing.

    python -m benchmarks.midsize benchmarks/runs/midsize-llava
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "runs" / "midsize-llava"


@dataclass(frozen=True, slots=True)
class Proportions:
    """The sizes of a LLaVA-1.5; the defaults are those of the mid-size one."""

    image_size: int = 336
    patch_size: int = 14
    tower_layers: int = 24
    tower_width: int = 384
    llm_layers: int = 14
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

    from examples.miniature import make_llava

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
    stamp.write_text(json.dumps(wanted))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="default: %(default)s")
    print(build(parser.parse_args().folder))


if __name__ == "__main__":
    main()

"""Evaluate a saved model without a server: `python -m training.evaluate`.

What training is watched with: accuracy per kind of question on scenes never trained on, unpruned,
with our method and at random.
"""

import argparse
from fractions import Fraction
from pathlib import Path

import torch

from benchmarks.quality.ablate import run_trials
from benchmarks.quality.cases import HARD_SPLITS, RETENTIONS, SPLITS, scene_ids
from benchmarks.quality.inference import SceneModel, load_model
from benchmarks.quality.record import provenance
from benchmarks.quality.results import Table, report, write
from benchmarks.quality.tables import tables
from benchmarks.quality.variants import OURS, Variant, ablations
from benchmarks.shared.provenance import ROOT

_RANDOM = "Random"


def pruned_settings(model: SceneModel) -> dict[str, tuple[Variant, set[Fraction]]]:
    """Return our method and a random choice, at all retentions."""
    components = {v.name: v for v in ablations(model.profile, model.num_layers)[0].variants}
    return {name: (components[name], set(RETENTIONS)) for name in (OURS, _RANDOM)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "scenes-llava")
    parser.add_argument(
        "--splits", nargs="+", choices=[*SPLITS, *HARD_SPLITS], default=list(SPLITS)
    )
    parser.add_argument("--scenes", type=int, default=500, help="per split")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--unpruned", action="store_true", help="only without pruning")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = load_model(arguments.model, getattr(torch, arguments.dtype))
    settings = {} if arguments.unpruned else pruned_settings(model)
    marks = run_trials(model, scene_ids(arguments.splits, 1, arguments.scenes), settings)
    facts = {
        **provenance(arguments.model, "training.evaluate"),
        "dtype": arguments.dtype,
        "scenes": {"splits": arguments.splits, "seeds": 1, "per_seed": arguments.scenes},
    }
    retentions = () if arguments.unpruned else RETENTIONS
    table = Table("Accuracy", tuple((name, name) for name in settings), OURS, retentions)
    results = report(facts, marks, [table], None if arguments.unpruned else _RANDOM)
    print(tables(results))
    if arguments.json:
        write(results, arguments.json)


if __name__ == "__main__":
    main()

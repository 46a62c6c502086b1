"""The columns of the tables: which lmms-eval tasks and metrics make a benchmark's score."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.paper.errors import EvaluationError


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One column: the sum over `metrics` of their mean over `tasks`, times `scale`."""

    tasks: tuple[str, ...]
    metrics: tuple[str, ...] = ("exact_match",)
    scale: float = 100.0

    def score(self, results: Mapping[str, Mapping[str, Any]]) -> float:
        """Return the score in the paper's unit from the `results` of an lmms-eval run."""
        values = [[_value(results, t, metric) for t in self.tasks] for metric in self.metrics]
        return self.scale * sum(sum(each) / len(each) for each in values)


# Choices that the paper leaves open are explained in docs/paper-benchmarks.md.
BENCHMARKS = {
    "GQA": Benchmark(("gqa",)),
    # The variant whose letters are found by rules; the other asks a commercial model.
    "MMB": Benchmark(("mmbench_en_dev_static",), ("gpt_eval_score",), scale=1.0),
    "MME": Benchmark(("mme",), ("mme_perception_score", "mme_cognition_score"), scale=1.0),
    "POPE": Benchmark(("pope_adv", "pope_pop", "pope_random"), ("pope_f1_score",)),
    "SQA": Benchmark(("scienceqa_img",)),
    "VQAv2": Benchmark(("vqav2_val",)),
    "TextVQA": Benchmark(("textvqa_val",)),
    # LLaVA-1.5's published scores come with the data set's OCR tokens in the prompt.
    "TextVQA-OCR": Benchmark(("msdg_textvqa_ocr",)),
    "SEED-I": Benchmark(("msdg_seedbench_image",), ("seed_image",)),
    "VizWiz": Benchmark(("vizwiz_vqa_val",)),
    "MMMU": Benchmark(("mmmu_val",), ("mmmu_acc",)),
    "HRB-8K": Benchmark(("hrbench8k",), ("average",)),
    # Of no paper: generated scenes, see scenes.py.
    "scenes": Benchmark(("msdg_scenes",)),
}


def _value(results: Mapping[str, Mapping[str, Any]], task: str, metric: str) -> float:
    metrics = results.get(task, {})
    # lmms-eval appends the name of the filter; ours use none.
    value = metrics.get(f"{metric},none")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise EvaluationError(
            f"lmms-eval reported no number for {metric} of {task}, but {value!r}; "
            f"it has {sorted(metrics)}. Its version may name metrics differently: "
            "the `paper` group of pyproject.toml says which versions fit"
        )
    return float(value)

"""Evaluate a saved model with transformers alone: `python -m benchmarks.quality.evaluate`.

Accuracy per kind of question on scenes never trained on, unpruned and with tokens dropped. An
answer counts if every token of it, its end included, is the most likely one: what greedy decoding
would say.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoProcessor, LlavaForConditionalGeneration

from benchmarks.quality.drawing import draw_scene
from benchmarks.quality.export import MODELS
from benchmarks.quality.pool import question_tokens
from benchmarks.quality.questions import KINDS, Question, ask_one_of_each
from benchmarks.quality.scenes import Scene, Split, sample_scene
from msdg_vllm.core import analyze_image, num_kept_tokens, select_tokens
from msdg_vllm.profiles import EncoderProfile

PROFILE = "msdg_profile.json"
RETENTIONS = ("1/3", "2/9", "1/9", "1/18")
_PICTURES_AT_ONCE = 32
_QUESTIONS_AT_ONCE = 64


class Model:
    """A saved model, and what of it pruning needs."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.processor: Any = AutoProcessor.from_pretrained(folder)
        self.llava: Any = LlavaForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()
        path = folder / PROFILE
        self.profile = EncoderProfile.load(path) if path.exists() else None
        self.opening = self.processor.tokenizer("USER:", return_tensors="pt").input_ids[0]

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.llava.get_input_embeddings()(tokens)
        return embedded

    @torch.inference_mode()
    def see(self, scenes: list[Scene]) -> tuple[Tensor, list[Tensor]]:
        """Return projected tokens `(B, N, D)` and the state entering each layer `(B, N, d)`."""
        pictures = [draw_scene(scene) for scene in scenes]
        pixels = self.processor.image_processor(pictures, return_tensors="pt").pixel_values
        pixels = pixels.to(self.llava.dtype)
        seen = self.llava.model.vision_tower(pixels, output_hidden_states=True)
        states = [state[:, 1:] for state in seen.hidden_states]
        return self.llava.model.multi_modal_projector(states[-2]), states

    @torch.inference_mode()
    def correct(self, visual: Tensor, questions: list[Question]) -> list[bool]:
        """Tell for each question, asked of its own rows `(Q, B, D)`, whether it is answered."""
        rows = [question_tokens(self.processor.tokenizer, q.text, q.answer) for q in questions]
        longest = max(len(tokens) for tokens, _ in rows)
        text = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens, _ in rows])
        opening = self.embed(self.opening).expand(len(rows), -1, -1)
        inputs = torch.cat([opening, visual, self.embed(text)], dim=1)
        # Padding comes last, where a causal model cannot see it from the answers.
        output = self.llava.model.language_model(inputs_embeds=inputs, use_cache=False)
        start = inputs.shape[1] - longest
        said = self.llava.lm_head(output.last_hidden_state[:, start:]).argmax(-1)
        return [
            said[number, prompt - 1 : len(tokens) - 1].tolist() == tokens[prompt:]
            for number, (tokens, prompt) in enumerate(rows)
        ]


def accuracies(
    model: Model,
    split: Split,
    num_scenes: int,
    methods: dict[str, tuple[str, float]],
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """Return accuracy per kind, and `overall`, for each named (method, retention)."""
    hits: dict[str, dict[str, list[bool]]] = {name: defaultdict(list) for name in methods}
    for first in tqdm(range(0, num_scenes, _PICTURES_AT_ONCE), desc=split, leave=False):
        numbers = range(first, min(first + _PICTURES_AT_ONCE, num_scenes))
        scenes = [sample_scene(number, split) for number in numbers]
        visual, states = model.see(scenes)
        asked = [
            (row, question)
            for row, scene in enumerate(scenes)
            for question in ask_one_of_each(scene, seed)
        ]
        for name, (method, retention) in methods.items():
            for part in _parts(asked):
                rows = [_kept(model, visual, states, r, q, method, retention) for r, q in part]
                answered = model.correct(torch.stack(rows), [q for _, q in part])
                for (_, question), right in zip(part, answered, strict=True):
                    hits[name][question.kind].append(right)
                    hits[name]["overall"].append(right)
    return {
        name: {kind: sum(by[kind]) / len(by[kind]) for kind in (*KINDS, "overall")}
        for name, by in hits.items()
    }


def _parts(asked: list[tuple[int, Question]]) -> Iterator[list[tuple[int, Question]]]:
    for first in range(0, len(asked), _QUESTIONS_AT_ONCE):
        yield asked[first : first + _QUESTIONS_AT_ONCE]


@torch.inference_mode()
def _kept(
    model: Model,
    visual: Tensor,
    states: list[Tensor],
    row: int,
    question: Question,
    method: str,
    retention: float,
) -> Tensor:
    tokens = visual[row]
    if method == "all":
        return tokens
    budget = num_kept_tokens(len(tokens), retention)
    if method == "random":
        generator = torch.Generator().manual_seed(row)
        keep = torch.randperm(len(tokens), generator=generator)[:budget].sort().values
        return tokens[keep]
    if model.profile is None:
        raise ValueError(f"no {PROFILE} beside the weights; run benchmarks.quality.calibrate first")
    signals = analyze_image({n: states[n][row] for n in model.profile.layers}, model.profile)
    query = model.embed(model.processor.tokenizer(question.text, return_tensors="pt").input_ids[0])
    return tokens[select_tokens(signals, tokens, query, budget)]


def _table(results: dict[str, dict[str, float]]) -> str:
    kinds = (*KINDS, "overall")
    lines = ["| tokens kept | " + " | ".join(kinds) + " |", "|---|" + "---:|" * len(kinds)]
    for name, by in results.items():
        lines.append(f"| {name} | " + " | ".join(f"{100 * by[kind]:.1f}" for kind in kinds) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=MODELS / "scenes-llava")
    parser.add_argument("--scenes", type=int, default=500, help="per split")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--unpruned", action="store_true", help="only without pruning")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the accuracies here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = Model(arguments.model, getattr(torch, arguments.dtype))
    methods = {"all": ("all", 1.0)}
    if not arguments.unpruned:
        for method in ("msdg", "random"):
            for text in RETENTIONS:
                over, under = text.split("/")
                methods[f"{method} {text}"] = (method, int(over) / int(under))
    results = {}
    for split in ("test", "held_out"):
        results[split] = accuracies(model, split, arguments.scenes, methods)
        print(
            f"\n{split}: {arguments.scenes} scenes, {arguments.dtype}\n\n{_table(results[split])}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

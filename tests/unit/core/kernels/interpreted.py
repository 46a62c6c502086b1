"""Run the kernels in Triton's interpreter beside the torch code and the reference; print JSON.

A process of its own, because the interpreter replaces the compiler when Triton is imported.

    TRITON_INTERPRET=1 python -m tests.unit.core.kernels.interpreted 520
"""

import json
import random
import sys
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
import triton.runtime.interpreter as interpreter
from torch import Tensor
from torch.nn.functional import pad

from msdg_vllm.core import (
    ImageSignals,
    SelectionOptions,
    analyze_image,
    kernels,
    score_tokens,
    take_tokens,
)
from msdg_vllm.core.analysis import analyze_tokens
from msdg_vllm.core.kernels import analysis, selection
from msdg_vllm.core.kernels import signals as signals_kernels
from msdg_vllm.core.profiles import EncoderProfile
from msdg_vllm.core.stream import TokenStream
from tests.unit.core.cases import Case, random_case
from tests.unit.core.kernels.interpreted_rivals import compare_rivals

TYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)
CASES_PER_CALL = 8
WIDEST = 48  # of the tokens of a random case
MAX_TOKENS = 200  # beyond, the interpreter needs seconds
ABLATION = SelectionOptions(sink_filter=False)
FEW_LARGE = (350, 300)


class Patched:
    """Triton's language, replaced by the interpreter once: each call would do it again."""

    done: set[int] = set()  # noqa: RUF012
    patch = staticmethod(interpreter._patch_lang)

    def __init__(self, function: Any) -> None:
        if id(function.__globals__) not in self.done:
            self.done.add(id(function.__globals__))
            Patched.patch(function)

    def restore(self) -> None:
        """Leave everything as it is."""


def make_case(seed: int) -> tuple[Case, torch.dtype]:
    """A random image in one of the types that encoders use, some with states that are not finite.

    The case holds float32 values that the type can represent.
    """
    dtype = TYPES[seed % len(TYPES)]
    case = random_case(seed)
    states = {layer: state.to(dtype).float() for layer, state in case.states.items()}
    draw = random.Random(seed)
    if seed % 10 == 7:
        for _ in range(draw.randint(1, 4)):
            state = states[draw.choice(list(states))]
            row = draw.randrange(len(state))
            state[row, draw.randrange(state.shape[1])] = draw.choice([torch.nan, torch.inf])
    visual, query = case.visual.to(dtype).float(), case.query.to(dtype).float()
    return replace(case, states=states, visual=visual, query=query), dtype


def analyze_by_kernels(case: Case, dtype: torch.dtype, *, small: bool) -> ImageSignals:
    """The signals of one image, by a matrix of all cosines or by blocks."""
    kernels.MAX_PAIRED_TOKENS = 10**6 if small else 0
    states = {layer: state.to(dtype).unsqueeze(0) for layer, state in case.states.items()}
    valid = None if case.valid is None else case.valid.unsqueeze(0)
    return analyze_rows(states, case.profile, case.patches_per_token, valid)[0]


def analyze_rows(
    states: dict[int, Tensor],
    profile: EncoderProfile,
    patches_per_token: int,
    valid: Tensor | None = None,
    order: Tensor | None = None,
) -> ImageSignals:
    """The signals of images, `(R, P, d)`, by kernels from the first to the last."""
    kernels.DEVICES = {"cpu"}
    with kernels.recorded_launches() as launches:
        stream = TokenStream(profile, patches_per_token, order=order)
        for layer in stream.layers:
            stream.take(layer, states[layer])
        tokens = stream.finish()
        images = [tokens.map(itemgetter(row)) for row in range(len(tokens.saliency))]
        signals = analyze_tokens(images, profile, valid=valid)
    kernels.DEVICES = set()
    assert signals_kernels.direction_kernel in [launch.kernel for launch in launches]
    return signals


def compare(seeds: list[int]) -> list[dict[str, Any]]:
    """Analyse some cases one by one, select from all of them in one call."""
    cases = [make_case(seed) for seed in seeds]
    signals = [
        analyze_by_kernels(case, dtype, small=seed % 3 > 0)
        for seed, (case, dtype) in zip(seeds, cases, strict=True)
    ]
    # Zeros change no cosine; so tokens of all widths fit in one call.
    selected = selection.select_rows(
        signals,
        [pad(case.visual, (0, WIDEST - case.visual.shape[1])) for case, _ in cases],
        [pad(case.query, (0, WIDEST - case.query.shape[1])) for case, _ in cases],
        [case.budget for case, _ in cases],
    )
    return [
        describe(seed, *cases[place], signals[place], *selected[place])
        for place, seed in enumerate(seeds)
    ]


def describe(
    seed: int,
    case: Case,
    dtype: torch.dtype,
    signals: ImageSignals,
    keep: Tensor,
    relevance: Tensor,
    score: Tensor,
) -> dict[str, Any]:
    """What the kernels, the torch code and the reference made of a case."""
    expected = case.solve()
    torchs = analyze_image(case.states, case.profile, case.patches_per_token, valid=case.valid)
    scores = score_tokens(torchs, case.visual, case.query)
    kept = take_tokens(torchs, scores, case.budget)
    is_close = all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-5)
        for a, b in (
            (signals.saliency, torchs.saliency),
            (signals.sink_activation, torchs.sink_activation),
            (relevance, scores.relevance),
            (score, scores.score),
        )
    )
    return {
        "seed": seed,
        "margin": expected.margin,
        "keep": keep.tolist() == expected.keep,
        "groups": signals.groups.tolist() == expected.groups,
        "keep as torch": torch.equal(keep, kept),
        "groups as torch": torch.equal(signals.groups, torchs.groups),
        "values as torch": is_close,
        "sinks as torch": torch.equal(signals.sink_mask, torchs.sink_mask),
        "num_groups as torch": torch.equal(signals.num_groups, torchs.num_groups),
        "corners": [
            name
            for name, holds in {
                str(dtype): True,
                "by a matrix": seed % 3 > 0,
                "by blocks": seed % 3 == 0,
                f"stopped by {expected.stopped_by}": bool(expected.candidates),
                "sinks": bool(expected.sinks),
                "nothing but sinks": not expected.candidates,
                "budget beyond the candidates": case.budget > len(expected.candidates),
                "more groups than candidates": case.profile.num_groups > len(expected.candidates),
                "empty groups reseeded": expected.num_reseeded > 0,
                "empty groups reseeded by blocks": expected.num_reseeded > 0 and seed % 3 == 0,
                "copies": len({x.numpy().tobytes() for x in case.visual}) < len(case.visual),
                "no query": not len(case.query),
                "padding": case.valid is not None,
                "merged patches": case.patches_per_token == 4,
                "not finite": any(not s.isfinite().all() for s in case.states.values()),
                "over 160 tokens": len(case.visual) > 160,
            }.items()
            if holds
        ],
    }


def compare_batches() -> dict[str, bool]:
    """Whether images have the same bits alone and beside others, by path and by half."""
    generator = torch.Generator().manual_seed(0)
    cases = [random_case(seed) for seed in (66, 12)]
    facts: dict[str, bool] = {}
    for small in (True, False):
        kernels.MAX_PAIRED_TOKENS = 10**6 if small else 0
        path = "by a matrix" if small else "by blocks"
        for case in cases:
            # The same tokens in another order, twice the same image, and one of zeros.
            order = torch.randperm(len(case.states[0]), generator=generator)
            rows = [
                {
                    layer: torch.stack([state, state[order], state, torch.zeros_like(state)])[row]
                    for layer, state in case.states.items()
                }
                for row in range(4)
            ]
            batch = {n: torch.stack([row[n] for row in rows]) for n in case.states}
            together = analyze_rows(batch, case.profile, case.patches_per_token)
            alone = [
                analyze_rows(
                    {n: state.unsqueeze(0) for n, state in row.items()},
                    case.profile,
                    case.patches_per_token,
                )
                for row in rows
            ]
            shuffled = {n: state.index_select(1, order.argsort()) for n, state in batch.items()}
            put_right = analyze_rows(shuffled, case.profile, case.patches_per_token, order=order)
            facts[f"patches in another order, {len(case.visual)} tokens {path}"] = torch.equal(
                put_right.groups, together.groups
            ) and torch.equal(put_right.saliency, together.saliency)
            facts[f"analysis of {len(case.visual)} tokens {path}"] = all(
                torch.equal(getattr(together, name)[row], getattr(alone[row], name)[0])
                for row in range(len(rows))
                for name in ("saliency", "groups", "num_groups", "sink_mask", "sink_activation")
            )
            asked = [case.query, None, torch.randn(20, case.query.shape[1]), case.query[:0]]
            budgets = [1, case.budget, 2, len(case.visual)]
            signals, visual = [row[0] for row in alone], [case.visual] * len(rows)
            answers = selection.select_rows(signals, visual, asked, budgets)
            facts[f"selection of {len(case.visual)} tokens {path}"] = all(
                torch.equal(a, b)
                for row, answer in enumerate(answers)
                for a, b in zip(
                    answer,
                    selection.select_rows(
                        signals[row : row + 1],
                        visual[:1],
                        asked[row : row + 1],
                        budgets[row : row + 1],
                    )[0],
                    strict=True,
                )
            )
            kernels.DEVICES = set()
            expected = analyze_image(case.states, case.profile, options=ABLATION)
            kernels.DEVICES = {"cpu"}
            with kernels.recorded_launches() as launches:
                grouped = analyze_image(case.states, case.profile, options=ABLATION)
            facts[f"groups of an ablation, {len(case.visual)} tokens {path}"] = bool(
                launches
            ) and torch.equal(grouped.groups, expected.groups)
            kernels.DEVICES = set()
    facts["embeddings that are not finite"] = _compare_embeddings(cases[0])
    return facts


def _compare_embeddings(case: Case) -> bool:
    """Whether tokens and queries with values that are not finite score as in torch."""
    signals = analyze_image(case.states, case.profile, case.patches_per_token)
    visual, query = torch.randn(len(case.visual), 24), torch.randn(18, 24)
    visual[3, 1], visual[5, 2] = torch.nan, torch.inf
    query[2, 3], query[17, 0] = torch.inf, torch.nan
    for asked in (query, torch.full_like(query, torch.nan)):
        ((_, relevance, _),) = selection.select_rows([signals], [visual], [asked], [2])
        expected = score_tokens(signals, visual, asked).relevance
        if not torch.allclose(relevance, expected, rtol=1e-5, atol=1e-6):
            return False
    return True


def main() -> None:
    """Compare as many cases as the command line says."""
    torch.set_num_threads(1)
    interpreter._patch_lang = Patched
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    # Fewer programs; what one does is the same.
    analysis._COLUMNS = analysis._SUM_COLUMNS = 64
    seeds = list(FEW_LARGE)
    seed = 0
    while len(seeds) < int(sys.argv[1]):
        seed += 1
        if seed % 25 and len(random_case(seed).visual) <= MAX_TOKENS:
            seeds.append(seed)
    results = []
    for start in range(0, len(seeds), CASES_PER_CALL):
        results += compare(seeds[start : start + CASES_PER_CALL])
    found = {"cases": results, "batches": compare_batches(), "rivals": compare_rivals()}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()

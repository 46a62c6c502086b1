"""Images that are encoded again in other batches, in bfloat16, beside half of their KV cache."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from benchmarks.shared.provenance import ROOT
from tests.engine.generation import Request, processor_kwargs, running_engine
from tests.engine.probes import resize_store
from tests.engine.second_question import images_encoded
from tests.pictures import make_picture

NUM_TOKENS, BLOCK, NUM_BLOCKS = 144, 32, 60
# Relative; bfloat16 rounds by up to 0.004, and the layers of a tower add that up.
NOISE = 0.02
QUESTION = "what is on the left of the red square?"


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with running_engine(
        ROOT / "models" / "scenes-llava",
        dtype="bfloat16",
        block_size=BLOCK,
        num_gpu_blocks_override=NUM_BLOCKS,
        max_model_len=(NUM_BLOCKS - 1) * BLOCK,
        # Four images at a time, in the tower and in vLLM's encoder cache.
        max_num_batched_tokens=4 * NUM_TOKENS,
        enable_prefix_caching=True,
    ) as engine:
        # Nothing but the memory of what was kept: every image is encoded again.
        engine.apply_model(partial(resize_store, max_bytes=0))
        engine.apply_model(disturb)
        yield engine


def disturb(model: Any) -> None:
    """Change what is read of the encoder a little every time, and note which tokens are kept.

    So an image that is encoded again has other signals, as it has by itself in other batches, but
    often enough for a test. Its tokens are left alone, so that answers can be compared.
    """
    import torch

    from msdg_vllm.engine.worker.selection import EncodedImage

    model.gathered = []
    generator = torch.Generator().manual_seed(0)
    encode_items, rows_of = model.encode_items, EncodedImage.rows_of

    def shaken(tensor: Any) -> Any:
        if not tensor.is_floating_point():
            return tensor
        return tensor * (1 + NOISE * torch.randn(tensor.shape, generator=generator)).to(tensor)

    def disturbed(*args: Any) -> Any:
        for images in encode_items(*args):
            yield [replace(image, signals=image.signals.map(shaken)) for image in images]

    def noted(image: Any, selection: Any) -> Any:
        model.gathered.append(selection.indices.tolist())
        return rows_of(image, selection)

    model.encode_items = disturbed
    EncodedImage.rows_of = noted  # type: ignore[assignment, method-assign]


def take_gathered(model: Any) -> list[list[int]]:
    """The tokens of each image that were kept since the last call."""
    gathered, model.gathered = model.gathered, []
    return list(gathered)


def forget_selections(model: Any) -> None:
    """Do without the memory of what was kept."""
    model.selections.clear()


def ask(seed: int) -> Request:
    """Four pictures, which one step encodes together."""
    pictures = [make_picture(96, 96, 4 * seed + number) for number in range(4)]
    return {
        "prompt": "USER: " + "<image>\n" * 4 + f"{QUESTION} ASSISTANT:",
        "multi_modal_data": {"image": pictures},
        "mm_processor_kwargs": processor_kwargs({"retention": 0.6, "query": QUESTION}),
    }


def crowd_out(seed: int, num_blocks: int) -> Request:
    """A prompt of that many blocks whose four whole pictures fill vLLM's encoder cache."""
    chance = random.Random(seed)
    pictures = [make_picture(96, 96, 10_000 + 4 * seed + number) for number in range(4)]
    image = 4  # the checkpoint's placeholder
    text = [chance.randrange(10, 600) for _ in range(num_blocks * BLOCK - 4 * NUM_TOKENS - 2)]
    return {
        "prompt_token_ids": [image, image, image, image, *text],
        "multi_modal_data": {"image": pictures},
    }


def answer(llm: Any, request: Request, max_tokens: int) -> Any:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=5, ignore_eos=True)
    (output,) = llm.generate([dict(request)], params, use_tqdm=False)
    return output


@dataclass(frozen=True, slots=True)
class Twice:
    """One request, answered before and after half of its KV cache was evicted.

    Attributes:
        first: Its first answer.
        again: Its second, of which the KV cache had the beginning.
        kept: What was kept of its images.
        kept_again: What was kept of those that were encoded again, its last ones.
    """

    first: Any
    again: Any
    kept: list[list[int]]
    kept_again: list[list[int]]

    @property
    def deviation(self) -> float:
        """The largest difference of log-probabilities; infinite for other tokens."""
        ours, theirs = self.again.outputs[0], self.first.outputs[0]
        if ours.token_ids != theirs.token_ids:
            return math.inf
        return max(
            abs(now[token_id].logprob - then[token_id].logprob)
            for now, then in zip(ours.logprobs, theirs.logprobs, strict=True)
            for token_id in now.keys() & then.keys()
        )


def answer_twice(llm: Any, seed: int, *, with_memory: bool) -> Twice:
    """Answer a request, crowd out half of its KV cache and its images, and answer it again."""
    llm.apply_model(take_gathered)
    first = answer(llm, ask(seed), 4)
    (kept,) = llm.apply_model(take_gathered)
    num_own = len(first.prompt_token_ids) // BLOCK
    answer(llm, crowd_out(seed, NUM_BLOCKS - 1 - num_own // 2), 1)
    if not with_memory:
        llm.apply_model(forget_selections)
    before = images_encoded(llm)
    again = answer(llm, ask(seed), 4)
    (kept_again,) = llm.apply_model(take_gathered)
    # Its KV cache ends within an image.
    assert 0 < again.num_cached_tokens < len(first.prompt_token_ids) * 3 // 4
    assert 0 < images_encoded(llm) - before == len(kept_again) < 4
    return Twice(first, again, kept, kept_again)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_encoded_again_keeps_what_it_kept(llm: Any, seed: int) -> None:
    twice = answer_twice(llm, seed, with_memory=True)
    assert twice.kept_again == twice.kept[-len(twice.kept_again) :]
    assert twice.deviation < 0.1


def test_without_the_memory_it_would_keep_other_tokens(llm: Any) -> None:
    changed = 0
    for seed in range(6, 10):
        twice = answer_twice(llm, seed, with_memory=False)
        before = twice.kept[-len(twice.kept_again) :]
        changed += sum(
            ours != theirs for ours, theirs in zip(twice.kept_again, before, strict=True)
        )
    assert changed > 2

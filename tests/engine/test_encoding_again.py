"""Images that are encoded again in other batches, in bfloat16, beside half of their KV cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from benchmarks.shared.provenance import ROOT
from tests.engine.generation import Request, processor_kwargs, running_engine
from tests.engine.probes import resize_store
from tests.engine.second_question import images_encoded
from tests.pictures import make_picture

NUM_TOKENS, BLOCK, NUM_BLOCKS = 144, 32, 60
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
        yield engine


def watch_selections(model: Any) -> None:
    """Count the selections that came out as before, and those that did not."""
    model.same, model.other = 0, 0
    settle = type(model.selections).settle

    def counted(spec: Any, selection: Any) -> Any:
        settled = settle(model.selections, spec, selection)
        if settled is not selection:
            is_same = settled.indices.tolist() == selection.indices.tolist()
            model.same, model.other = model.same + is_same, model.other + (not is_same)
        return settled

    model.selections.settle = counted


def selections_seen(model: Any) -> tuple[int, int]:
    return model.same, model.other


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


def test_what_is_encoded_again_keeps_what_it_kept(llm: Any) -> None:
    llm.apply_model(watch_selections)
    for seed in range(12):
        first = answer(llm, ask(seed), 4)
        num_own = len(first.prompt_token_ids) // BLOCK
        answer(llm, crowd_out(seed, NUM_BLOCKS - 1 - num_own // 2), 1)
        before = images_encoded(llm)
        again = answer(llm, ask(seed), 4)
        # Its KV cache ends within an image.
        assert 0 < again.num_cached_tokens < len(first.prompt_token_ids) * 3 // 4
        assert 0 < images_encoded(llm) - before < 4
        ours, theirs = again.outputs[0], first.outputs[0]
        assert ours.token_ids == theirs.token_ids
        for now, then in zip(ours.logprobs, theirs.logprobs, strict=True):
            for token_id in now.keys() & then.keys():
                assert abs(now[token_id].logprob - then[token_id].logprob) < 0.1
    ((same, other),) = llm.apply_model(selections_seen)
    assert same + other >= 12

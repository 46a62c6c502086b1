"""Running a real vLLM engine on the CPU and holding its answers against others."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    # Tests look inside the worker's model by sending it functions.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
DEFAULT_OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "limit_mm_per_prompt": {"image": 4},
    "seed": 0,
}

# Of log-probabilities; a GPU adds up in another order than Hugging Face on the CPU.
TOLERANCE = float(os.environ.get("MSDG_TEST_TOLERANCE", "1e-4"))

Request = Mapping[str, Any]
"""One prompt in the form `LLM.generate` takes."""


def processor_kwargs(wishes: Mapping[str, Any]) -> dict[str, Any]:
    """The form of wishes in `mm_processor_kwargs`: all but the retention under `pruning`."""
    from msdg_vllm.request import OPTIONS

    pruning = {name: value for name, value in wishes.items() if name in OPTIONS}
    rest = {name: value for name, value in wishes.items() if name not in OPTIONS}
    return {**rest, "pruning": pruning} if pruning else rest


@dataclass(frozen=True, slots=True)
class Generated:
    """What one request got: token ids, and the log-probabilities of the likeliest per step."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[dict[int, float]]


@contextmanager
def running_engine(folder: Path, **options: Any) -> Iterator[Any]:
    """A real engine on a checkpoint; it is gone when the block ends."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM
    from vllm.platforms import current_platform

    # Two engines at once must fit on one device.
    share = {} if current_platform.is_cpu() else {"gpu_memory_utilization": 0.3}
    llm = LLM(str(folder), **{**DEFAULT_OPTIONS, **share, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def generate(llm: Any, requests: Sequence[Request], *, max_tokens: int = 6) -> list[Generated]:
    """Greedy answers of an engine, all requests submitted at once."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=5, ignore_eos=True)
    outputs = llm.generate([dict(request) for request in requests], params, use_tqdm=False)
    return [generated(output) for output in outputs]


def generate_one_by_one(llm: Any, requests: Sequence[Request]) -> list[Generated]:
    """Greedy answers whose every bit can be compared: how requests share steps is up to timing."""
    return [answer for request in requests for answer in generate(llm, [request])]


def generated(output: Any) -> Generated:
    """The comparable part of a `RequestOutput`."""
    completion = output.outputs[0]
    return Generated(
        prompt_token_ids=list(output.prompt_token_ids),
        token_ids=list(completion.token_ids),
        logprobs=[
            {token_id: entry.logprob for token_id, entry in step.items()}
            for step in completion.logprobs
        ],
    )


def assert_same(actual: Generated, expected: Generated, *, tolerance: float = TOLERANCE) -> None:
    """Fail unless prompt, tokens and log-probabilities agree."""
    assert len(actual.prompt_token_ids) == len(expected.prompt_token_ids)
    assert actual.token_ids == expected.token_ids
    for step, (ours, theirs) in enumerate(zip(actual.logprobs, expected.logprobs, strict=True)):
        for token_id, logprob in ours.items():
            if token_id in theirs:
                assert abs(logprob - theirs[token_id]) <= tolerance, (step, token_id)
        assert actual.token_ids[step] in theirs


def stock_answers(
    folder: Path, requests: Sequence[Request], **options: Any
) -> tuple[list[Generated], list[dict[str, list[str]]]]:
    """Answers and image hashes of vLLM without this plugin, from a process of its own."""
    with tempfile.TemporaryDirectory() as exchange:
        orders, answers = Path(exchange, "orders"), Path(exchange, "answers")
        orders.write_bytes(pickle.dumps((folder, list(requests), options)))
        subprocess.run(
            [sys.executable, "-m", "tests.engine.generation", str(orders), str(answers)],
            check=True,
            # It ends with this one engine, which needs no process of its own.
            env={**os.environ, "VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            timeout=600,
        )
        answered: tuple[list[Generated], list[dict[str, list[str]]]] = pickle.loads(
            answers.read_bytes()
        )
        return answered


def image_hashes(llm: Any, request: Request) -> dict[str, list[str]]:
    """The identities under which an engine caches the images of a request."""
    from vllm.renderers.inputs.preprocess import parse_model_prompt

    prompt = parse_model_prompt(llm.model_config, dict(request))
    # Past the cache: an entry made here would be taken for one that the engine has got.
    (engine_input,) = llm.renderer.render_cmpl([prompt], skip_mm_cache=True)
    return {name: list(hashes) for name, hashes in engine_input["mm_hashes"].items()}


def _answer_orders(orders: Path, answers: Path) -> None:
    folder, requests, options = pickle.loads(orders.read_bytes())
    with running_engine(folder, **options) as llm:
        hashes = [image_hashes(llm, request) for request in requests]
        answers.write_bytes(pickle.dumps((generate_one_by_one(llm, requests), hashes)))


if __name__ == "__main__":
    # Pickled classes must belong to the module that the parent imports.
    from tests.engine import generation

    generation._answer_orders(Path(sys.argv[1]), Path(sys.argv[2]))

"""Adapters of the language model beside pruned images, on the real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints import make_llava
from tests.engine.generation import Generated, Request, assert_same, generated, running_engine
from tests.pictures import picture_of

QUESTIONS = ("Is there a blue circle in the picture?", "Read the code on the sign.")
RANK = 8


def make_adapter(folder: Path, model: Path, scale: float) -> Path:
    """Random low-rank updates of the attention of a LLaVA's decoder; scale 0 changes nothing."""
    config = json.loads((model / "config.json").read_text())["text_config"]
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    key_width = width // config["num_attention_heads"] * config["num_key_value_heads"]
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for layer in range(layers):
        for name, rows in (("q_proj", width), ("v_proj", key_width)):
            place = f"base_model.model.language_model.model.layers.{layer}.self_attn.{name}"
            down = torch.randn(RANK, width, generator=generator)
            weights[f"{place}.lora_A.weight"] = down
            weights[f"{place}.lora_B.weight"] = scale * torch.randn(rows, RANK, generator=generator)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> tuple[Path, Path]:
    """One that changes nothing, and one that does."""
    home = tmp_path_factory.mktemp("lora")
    return make_adapter(home / "none", folder, 0.0), make_adapter(home / "random", folder, 1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
    options |= {"max_num_batched_tokens": 4096}
    with running_engine(folder, enable_prefix_caching=False, **options) as engine:
        yield engine


def wraps_embeddings(model: Any) -> bool:
    """Whether the embedding table is one that looks for adapters."""
    return "LoRA" in type(model.get_language_model().model.embed_tokens).__name__


def ask(question: str, seed: int, retention: float) -> Request:
    return {
        "prompt": f"USER: <image>\n{question} ASSISTANT:",
        "multi_modal_data": {"image": picture_of("square", seed)},
        "mm_processor_kwargs": {"retention": retention},
    }


def answers(llm: Any, requests: list[Request], adapters: list[Any]) -> list[Generated]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=5, logprobs=5, ignore_eos=True)
    outputs = llm.generate(
        [dict(one) for one in requests], params, use_tqdm=False, lora_request=adapters
    )
    return [generated(output) for output in outputs]


def test_a_mixed_step_answers_each_request_as_if_it_were_alone(
    llm: Any, adapters: tuple[Path, Path]
) -> None:
    from vllm.lora.request import LoRARequest

    assert llm.apply_model(wraps_embeddings) == [True]
    # In a mixed step vLLM's CPU kernels give requests without an adapter somebody else's, so one
    # that changes nothing takes the place of none.
    nothing, random = (
        LoRARequest(path.name, number, str(path)) for number, path in enumerate(adapters, start=1)
    )
    cases = [
        (ask(question, seed, retention), one)
        for seed, question in enumerate(QUESTIONS)
        for retention in (0.1, 1.0)
        for one in (nothing, random)
    ]
    requests = [request for request, _ in cases]
    together = answers(llm, requests, [one for _, one in cases])
    alone = [answers(llm, [request], [one])[0] for request, one in cases]
    for ours, expected in zip(together, alone, strict=True):
        assert_same(ours, expected)
    without = [answers(llm, [request], [None])[0] for request in requests[::2]]
    for plain, unchanged, adapted in zip(without, alone[::2], alone[1::2], strict=True):
        assert_same(unchanged, plain)
        assert plain.logprobs != adapted.logprobs, "the adapter changes nothing"

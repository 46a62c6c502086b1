"""Encoder outputs that one engine stores and another loads, by vLLM's example connector."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from msdg_vllm.core.errors import SettingsError
from msdg_vllm.models.mini_gemini.prepare import prepare
from msdg_vllm.request import ItemTurn, PruningRequest, Turns
from tests.checkpoints import make_llava
from tests.engine.generation import (
    Generated,
    Request,
    assert_same,
    generate,
    processor_kwargs,
    running_engine,
)
from tests.glm_checkpoint import make_glm4v
from tests.internvl_checkpoint import make_internvl
from tests.kimi_vl_checkpoint import PLACEHOLDER, make_kimi_vl
from tests.llava_next_checkpoint import make_llava_next
from tests.mini_gemini_checkpoint import add_profile, make_mini_gemini
from tests.pictures import picture_of
from tests.qwen_checkpoint import make_qwen2_5_vl, make_qwen2_vl, make_qwen3_5, make_qwen3_vl

QUESTION = "Is there a blue circle in the picture?"
OPTIONS = {"max_model_len": 1024, "max_num_batched_tokens": 1024, "enable_prefix_caching": False}
EVERY_FAMILY = "MSDG_TEST_EVERY_FAMILY"
"""Set, the families whose rows are laid out like another's are run as well."""


def make_prepared_mini_gemini(folder: Path) -> Path:
    prepare(make_mini_gemini(folder / "published"), folder / "prepared")
    add_profile(folder / "prepared")
    return folder / "prepared"


@dataclass(frozen=True)
class Family:
    """A tiny checkpoint, and what it takes to ask it about images."""

    make: Callable[[Path], Path]
    prompt: str
    placeholder: str
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def ask(self, *images: Any, **wishes: Any) -> Request:
        if wishes and "pruning" not in wishes:
            wishes["query"] = QUESTION
        return {
            "prompt": self.prompt.format(self.placeholder * len(images), QUESTION),
            "multi_modal_data": {"image": list(images)},
            "mm_processor_kwargs": processor_kwargs(wishes),
        }


def llava(make: Callable[[Path], Path], **options: Any) -> Family:
    return Family(make, "USER: {}{} ASSISTANT:", "<image>\n", options)


def qwen(make: Callable[[Path], Path], **options: Any) -> Family:
    placeholder = "<|vision_start|><|image_pad|><|vision_end|>"
    prompt = "<|im_start|>user\n{}{}<|im_end|>\n<|im_start|>assistant\n"
    return Family(make, prompt, placeholder, options)


# Rows as wide as an embedding; with columns for positions, and with DeepStack levels too.
LAYOUTS = {"llava": llava(make_llava), "qwen3_vl": qwen(make_qwen3_vl, max_model_len=512)}
OTHERS = {
    "llava_next": llava(make_llava_next, max_model_len=4096, max_num_batched_tokens=8192),
    "mini_gemini": llava(make_prepared_mini_gemini),
    "internvl": Family(make_internvl, "<s>user\n{}\n{}</s>assistant\n", "<IMG_CONTEXT>"),
    "qwen2_vl": qwen(make_qwen2_vl),
    "qwen2_5_vl": qwen(make_qwen2_5_vl),
    "qwen3_5": qwen(make_qwen3_5, worker_extension_cls="tests.engine.float32_delta_net.Extension"),
    "glm4v": Family(
        make_glm4v,
        "<|user|>\n{}{}<|assistant|>\n",
        "<|begin_of_image|><|image|><|end_of_image|>",
    ),
    "kimi_vl": Family(
        make_kimi_vl,
        "user: {} {} assistant:",
        PLACEHOLDER,
        {
            "trust_remote_code": True,
            # As in test_kimi_vl.py.
            "compilation_config": {"custom_ops": ["-rotary_embedding"]},
        },
        {"VLLM_MLA_DISABLE": "1"},
    ),
}
in_full_runs = pytest.mark.skipif(
    EVERY_FAMILY not in os.environ, reason=f"rows like another family's: {EVERY_FAMILY}=1 runs it"
)


def connector(folder: Path, role: str) -> dict[str, Any]:
    return {
        "ec_connector": "ECExampleConnector",
        "ec_role": role,
        "ec_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def watch_encoder(model: Any) -> None:
    """Count the calls of the encoder from now on."""
    model.num_encoder_calls = 0
    embed_multimodal = model.embed_multimodal

    def counted(**kwargs: Any) -> Any:
        model.num_encoder_calls += 1
        return embed_multimodal(**kwargs)

    model.embed_multimodal = counted


def num_encoder_calls(model: Any) -> int:
    """How often the encoder was called since it is watched."""
    calls: int = model.num_encoder_calls
    return calls


@pytest.mark.parametrize(
    "family",
    [
        *(pytest.param(family, id=name) for name, family in LAYOUTS.items()),
        *(pytest.param(family, id=name, marks=in_full_runs) for name, family in OTHERS.items()),
    ],
)
def test_answers_are_the_same_with_what_another_engine_encoded(
    tmp_path: Path, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in family.environment.items():
        monkeypatch.setenv(name, value)
    folder, stored = family.make(tmp_path / "model"), tmp_path / "stored"
    wide, tall = picture_of("wide", 1), picture_of("tall", 2)
    # A pruned and an unpruned image in one prompt: rows of both must be told apart.
    turns = [ItemTurn(QUESTION, retention=1.0), ItemTurn(QUESTION, retention=0.3)]
    both = PruningRequest(turns=Turns(QUESTION, {"image": turns}))
    requests = [
        family.ask(tall),
        family.ask(wide, retention=0.1, method="divprune"),
        family.ask(wide, tall, pruning=both),
    ]

    def answers(**options: Any) -> tuple[list[Generated], int]:
        with running_engine(folder, **{**OPTIONS, **family.options}, **options) as llm:
            llm.apply_model(watch_encoder)
            answered = generate(llm, requests, max_tokens=3)
            return answered, sum(llm.apply_model(num_encoder_calls))

    expected, _ = answers()
    produced, num_calls = answers(ec_transfer_config=connector(stored, "ec_both"))
    assert num_calls > 0
    assert len(list(stored.iterdir())) == 4
    consumed, num_calls = answers(ec_transfer_config=connector(stored, "ec_consumer"))
    assert num_calls == 0
    for ours in (produced, consumed):
        for answer, other in zip(ours, expected, strict=True):
            assert_same(answer, other)


@pytest.mark.parametrize("wish", ["ec_producer", "mm_encoder_only"])
def test_an_engine_without_a_language_model_is_refused_with_a_sentence(
    tmp_path: Path, wish: str
) -> None:
    folder = make_llava(tmp_path / "model")
    options: dict[str, Any] = (
        {"mm_encoder_only": True}
        if wish == "mm_encoder_only"
        else {"ec_transfer_config": connector(tmp_path, wish)}
    )
    with (
        pytest.raises(SettingsError, match=r"--mm-encoder-only, .*ec_producer.*ec_role ec_both"),
        running_engine(folder, **options),
    ):
        pass

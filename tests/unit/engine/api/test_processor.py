"""The API process's half on a real checkpoint: what a request asks becomes what is kept."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from msdg_vllm.core.errors import RequestError
from msdg_vllm.engine.api.budgets import Budgeting
from msdg_vllm.engine.api.processor import FITTING, SPECS
from msdg_vllm.engine.encoder import Offer
from msdg_vllm.engine.spec import PruningSpec
from msdg_vllm.methods import method_named
from tests.checkpoints import make_llava
from tests.pictures import picture_of
from tests.qwen_checkpoint import make_qwen2_5_vl
from tests.server.running import data_url, image_part, user

QUESTION = "Is there a blue circle in the picture?"


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The renderer of an engine that caches nothing, without the engine."""
    yield from _renderer(make_llava(tmp_path_factory.mktemp("llava")))


@pytest.fixture(scope="module")
def any_size(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The same for a model of free resolution."""
    yield from _renderer(make_qwen2_5_vl(tmp_path_factory.mktemp("qwen")))


def _renderer(folder: Path) -> Iterator[Any]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers import renderer_from_config

    arguments = EngineArgs(
        str(folder),
        dtype="float32",
        max_model_len=2048,
        mm_processor_cache_gb=0,
        enable_prefix_caching=False,
        limit_mm_per_prompt={"image": 4},
    )
    renderer = renderer_from_config(arguments.create_engine_config())
    yield renderer
    renderer.shutdown()


def generate(
    renderer: Any,
    question: str,
    *images: Any,
    salt: str | None = None,
    uuids: list[str] | None = None,
    marker: str = "<image>\n",
    **kwargs: Any,
) -> PruningSpec:
    """The spec of the first image of a raw prompt."""
    prompt = {
        "prompt": "USER: " + marker * len(images) + f"{question} ASSISTANT:",
        "multi_modal_data": {"image": list(images)},
        "mm_processor_kwargs": kwargs,
        **({"cache_salt": salt} if salt else {}),
        **({"multi_modal_uuids": {"image": uuids}} if uuids else {}),
    }
    (rendered,) = renderer.render_cmpl([prompt])
    spec: PruningSpec = rendered[SPECS]["image"][0]
    return spec


def chat(renderer: Any, *messages: Any, online: bool = False, **kwargs: Any) -> PruningSpec:
    """The spec of the first image of a chat."""
    from vllm.renderers import ChatParams

    params = ChatParams(
        chat_template_kwargs={"add_generation_prompt": True, "tokenize": False},
        mm_processor_kwargs=kwargs,
    )
    extras = {"mm_processor_kwargs": kwargs}
    if online:
        rendering = renderer.render_chat_async([list(messages)], params, prompt_extras=extras)
        _, (rendered,) = asyncio.run(rendering)
    else:
        _, (rendered,) = renderer.render_chat([list(messages)], params, prompt_extras=extras)
    spec: PruningSpec = rendered[SPECS]["image"][0]
    return spec


@pytest.mark.parametrize("method", ["msdg", "random"])
def test_generate_chat_and_http_keep_the_same_tokens(renderer: Any, method: str) -> None:
    wishes: dict[str, Any] = {"retention": 0.111, "pruning": {"method": method}}
    picture = picture_of("square", 1)
    spec = generate(renderer, QUESTION, picture, **wishes)
    assert spec.budget == 64
    assert spec == generate(renderer, QUESTION, picture, **wishes)
    message = user(QUESTION, image_part(picture))
    # A file is known by its bytes, an image by its pixels; the selection does not depend on it.
    from_file = replace(spec, content=chat(renderer, message, **wishes).content)
    assert from_file.content != spec.content
    assert chat(renderer, message, **wishes) == from_file
    assert chat(renderer, message, online=True, **wishes) == from_file
    head, tail = QUESTION[:11], QUESTION[11:]
    split = {"role": "user", "content": [image_part(picture), *user(head)["content"]]}
    split["content"] += user(tail)["content"]
    assert chat(renderer, split, **wishes) == from_file
    assert bool(spec.seed) == (method == "random")
    assert generate(renderer, QUESTION, picture_of("square", 2), **wishes).seed != spec.seed or (
        method == "msdg"
    )


def test_a_content_has_one_key_whatever_is_asked_and_whatever_it_is_called(renderer: Any) -> None:
    picture = picture_of("square", 1)
    spec = generate(renderer, QUESTION, picture, retention=0.111)
    assert spec.content
    for question, wishes in (
        ("What is on the left?", {"retention": 0.111}),
        (QUESTION, {"retention": 0.5, "pruning": {"method": "cdpruner", "scope": "image"}}),
    ):
        assert generate(renderer, question, picture, **wishes).content == spec.content
    named = generate(renderer, QUESTION, picture, retention=0.111, uuids=["a name"])
    assert named.content == spec.content
    assert generate(renderer, QUESTION, picture_of("square", 2), retention=0.111).content not in (
        0,
        spec.content,
    )
    assert generate(renderer, QUESTION, picture, retention=1.0).content == 0


def test_what_changes_the_pixels_or_separates_users_changes_the_key(renderer: Any) -> None:
    picture = picture_of("square", 1)
    wishes: dict[str, Any] = {"retention": 0.111}
    keys = [
        generate(renderer, QUESTION, picture, **wishes).content,
        generate(renderer, QUESTION, picture, do_rescale=False, **wishes).content,
        generate(renderer, QUESTION, picture, salt="one", **wishes).content,
        generate(renderer, QUESTION, picture, salt="two", **wishes).content,
    ]
    assert len(set(keys)) == 4
    assert generate(renderer, QUESTION, picture, salt="one", **wishes).content == keys[2]


def test_an_image_has_a_key_for_each_size_that_it_is_scaled_to(any_size: Any) -> None:
    """The store may serve a question from an image of the same size, never from another."""

    def asked(method: str, retention: float, question: str = QUESTION) -> PruningSpec:
        wishes = {"retention": retention, "pruning": {"method": method}}
        marker = "<|vision_start|><|image_pad|><|vision_end|>"
        return generate(any_size, question, picture, marker=marker, **wishes)

    picture = picture_of("wide", 1)
    whole, half, third = asked("msdg", 0.5), asked("resize", 0.5), asked("resize", 0.3)
    mixed = asked("resize+msdg", 0.3)
    sizes = {spec.num_tokens: spec.content for spec in (whole, half, third, mixed)}
    assert len(set(sizes.values())) == len(sizes) == 4
    assert whole.scaled_from == 0
    assert {spec.scaled_from for spec in (half, third, mixed)} == {whole.num_tokens}
    assert asked("resize", 0.3, "What is on the left?").content == third.content


def rendered_chat(renderer: Any, *messages: Any, **kwargs: Any) -> Any:
    from vllm.renderers import ChatParams

    params = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tokenize": False})
    extras = {"mm_processor_kwargs": kwargs}
    _, (rendered,) = renderer.render_chat([list(messages)], params, prompt_extras=extras)
    return rendered


def test_a_prompt_too_long_by_its_images_knows_the_largest_retention_that_fits(
    renderer: Any,
) -> None:
    message = user(QUESTION, *(image_part(picture_of("tiny", seed)) for seed in range(4)))
    fitting = rendered_chat(renderer, message)[FITTING]
    assert 0.5 < fitting < 1
    for retention, fits in ((fitting, True), (round(fitting + 0.001, 3), False)):
        rendered = rendered_chat(renderer, message, retention=retention)
        assert (len(rendered["prompt_token_ids"]) < 2048) == fits
    assert FITTING not in rendered_chat(renderer, message, retention=fitting)
    # Four tokens of images and 2044 of text leave no room for an answer.
    images = message["content"][:4]
    prompt = rendered_chat(renderer, user("word", *images), retention=0.001)["prompt_token_ids"]
    num_other = len(prompt) - 5
    hopeless = user(" ".join(["word"] * (2044 - num_other)), *images)
    assert rendered_chat(renderer, hopeless)[FITTING] == 0


def test_explicit_fields_win_over_detail_and_detail_over_the_name(
    renderer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from msdg_vllm.request import PruningRequest

    settings = replace(renderer.mm_processor.offer.settings, detail_low_retention=0.111)
    specifier = renderer.mm_processor._specifier
    monkeypatch.setattr(specifier, "_budgeting", Budgeting(settings))
    alias = {"pruning": PruningRequest(alias_retention=0.333)}
    picture = data_url(picture_of("tiny", 1))
    low = {"type": "image_url", "image_url": {"url": picture, "detail": "low"}}
    high = {"type": "image_url", "image_url": {"url": picture, "detail": "high"}}
    for part, kwargs, budget in (
        (low, {}, 64),
        (high, {}, 0),
        (high, alias, 192),
        (low, alias, 64),
        (low, {"retention": 0.5}, 288),
        (low, {"retention": 1.0}, 0),
        ({**low, "retention": 0.222}, {"retention": 0.5}, 128),
        ({"type": "input_image", "image_url": picture, "detail": "low"}, {}, 64),
    ):
        assert chat(renderer, user(QUESTION, part), **kwargs).budget == budget, (part, kwargs)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"retention": 0.5, "method": "random"}, '"pruning": {"method": ...}'),
        ({"query": "fox"}, '"pruning": {"query": ...}'),
        ({"retentoin": 0.5}, "did you mean `retention`?"),
        ({"pruning": {"methd": "random"}}, "did you mean method?"),
        ({"retention": "0.2"}, "must be a number"),
    ],
)
def test_a_misplaced_or_misspelt_wish_is_told_its_place(
    renderer: Any, kwargs: dict[str, Any], words: str
) -> None:
    picture = picture_of("tiny", 1)
    for call in (
        lambda: generate(renderer, QUESTION, picture, **kwargs),
        lambda: chat(renderer, user(QUESTION, image_part(picture)), **kwargs),
    ):
        with pytest.raises(RequestError) as caught:
            call()
        assert words in str(caught.value)


def test_a_misspelt_retention_of_an_image_is_told_its_name(renderer: Any) -> None:
    message = user(QUESTION, image_part(picture_of("tiny", 1), retenton=0.5))
    with pytest.raises(RequestError, match=r"messages\[0\].content\[0\].retenton is not a field"):
        chat(renderer, message)


def test_a_stock_processor_takes_kwargs_of_any_name_and_refuses_ours(
    renderer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.renderers.hf import HfRenderer

    seen: list[dict[str, Any]] = []

    def record(self: Any, prompt: Any, data: Any, uuids: Any, kwargs: Any, *rest: Any) -> Any:
        seen.append(kwargs)

    monkeypatch.setattr(HfRenderer, "_process_multimodal", record)
    monkeypatch.setattr(renderer, "mm_processor", object())
    renderer._process_multimodal([], {}, None, {"method": "linear", "query": 3})
    assert seen == [{"method": "linear", "query": 3}]
    for kwargs in ({"retention": 0.5}, {"pruning": {"method": "random"}}):
        with pytest.raises(RequestError, match=f"{next(iter(kwargs))} is not available for object"):
            renderer._process_multimodal([], {}, None, kwargs)


def test_a_method_that_the_operator_does_not_allow_is_refused(renderer: Any) -> None:
    picture = picture_of("square", 1)
    with pytest.raises(RequestError, match=r"'evocut' is not among .*--methods.*'msdg', 'random'"):
        generate(renderer, QUESTION, picture, retention=0.1, pruning={"method": "evocut"})


def test_an_item_too_large_for_a_method_is_refused(
    renderer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture, wishes = picture_of("square", 1), {"retention": 0.1, "pruning": {"method": "divprune"}}
    monkeypatch.setattr(type(method_named("divprune")), "max_tokens", 576)
    assert generate(renderer, QUESTION, picture, **wishes).budget == 58
    monkeypatch.setattr(type(method_named("divprune")), "max_tokens", 575)
    with pytest.raises(RequestError, match=r"up to 575 tokens.*image 0 has 576.*another method"):
        generate(renderer, QUESTION, picture, **wishes)
    assert method_named("prunesid").max_tokens is not None


def test_a_chat_finds_nothing_out_about_the_model_again(
    renderer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    monkeypatch.setattr(Offer, "of", lambda *_: made.append(_))
    # vLLM makes a processor of its own for each chat, only to ask for limits.
    spec = chat(renderer, user(QUESTION, image_part(picture_of("square", 3))), retention=0.111)
    assert spec.budget == 64
    assert made == []

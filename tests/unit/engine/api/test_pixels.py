"""Pixels by content: what reaches the engine equals what a processor without caches makes."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from vllm.multimodal.cache import LruKeyReplicatedReceiverCache, MultiModalProcessorOnlyCache
from vllm.v1.engine.core_client import SyncMPClient
from vllm.v1.serial_utils import MsgpackEncoder

from msdg_vllm.engine.spec import PruningSpec, field_name
from tests.checkpoints import make_llava
from tests.pictures import picture_of

QUESTIONS = ("Is there a blue circle?", "Read the code on the sign.", "How many stars?")
PICTURE_BYTES = 3 * 336 * 336 * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llava(tmp_path_factory.mktemp("llava"))


class Api:
    """The API process of an engine, and the engine's own cache, without the engine."""

    def __init__(self, folder: Path, cache_gb: float = 1.0) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from vllm.engine.arg_utils import EngineArgs
        from vllm.renderers import renderer_from_config
        from vllm.v1.engine.input_processor import InputProcessor

        arguments = EngineArgs(
            str(folder), dtype="float32", max_model_len=2048, mm_processor_cache_gb=cache_gb
        )
        self.config = arguments.create_engine_config()
        self.renderer: Any = renderer_from_config(self.config)
        self.processor = InputProcessor(self.config, self.renderer)
        self.receiver = LruKeyReplicatedReceiverCache(self.config.model_config)

    def render(self, question: str, picture: Any, **options: Any) -> Any:
        """A request as it leaves for the engine."""
        from vllm import SamplingParams

        extras = {name: options.pop(name) for name in ("uuid", "salt") if name in options}
        prompt = {
            "prompt": f"USER: <image>\n{question} ASSISTANT:",
            "multi_modal_data": {"image": [picture]},
            "mm_processor_kwargs": options,
            **({"cache_salt": extras["salt"]} if "salt" in extras else {}),
            **({"multi_modal_uuids": {"image": [extras["uuid"]]}} if "uuid" in extras else {}),
        }
        (rendered,) = self.renderer.render_cmpl([prompt])
        return self.processor.process_inputs(
            "request", rendered, SamplingParams(max_tokens=1), supported_tasks=("generate",)
        )

    def deliver(self, request: Any) -> Any:
        """What the engine gets; raises if it misses an item."""
        client = Mock(spec=SyncMPClient, is_dp=False)
        SyncMPClient.add_request(client, request)
        self.receiver.get_and_update_features(request.mm_features)
        return request


def spec_in(request: Any) -> PruningSpec:
    (feature,) = request.mm_features
    return PruningSpec.from_tensor(feature.data[field_name("image")].data)


def assert_equal(request: Any, expected: Any) -> None:
    """Fail unless the engine would do the same for both."""
    assert request.prompt_token_ids == expected.prompt_token_ids
    (ours,), (theirs,) = request.mm_features, expected.mm_features
    assert ours.identifier == theirs.identifier
    assert ours.mm_position == theirs.mm_position
    assert set(ours.data) == set(theirs.data)
    for name in ours.data:
        assert torch.equal(ours.data[name].data, theirs.data[name].data), name


@pytest.fixture(scope="module")
def uncached(folder: Path) -> Iterator[Api]:
    api = Api(folder, cache_gb=0)
    yield api
    api.renderer.shutdown()


@pytest.fixture
def api(folder: Path) -> Iterator[Api]:
    api = Api(folder)
    yield api
    api.renderer._mm_processor_cache.clear_cache()
    api.renderer.shutdown()


def test_a_second_question_sends_no_pixels(api: Api, uncached: Api) -> None:
    picture = picture_of("square", 1)
    api.deliver(api.render(QUESTIONS[0], picture, retention=0.111))
    second = api.render(QUESTIONS[1], picture, retention=0.222)
    (feature,) = second.mm_features
    assert set(feature.data) == {field_name("image")}
    assert sum(map(len, map(bytes, MsgpackEncoder().encode(second)))) < 4096
    expected = uncached.render(QUESTIONS[1], picture, retention=0.222)
    assert_equal(api.deliver(second), expected)
    assert spec_in(second).budget == 128


def test_a_second_question_is_not_preprocessed(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = picture_of("square", 2)
    api.deliver(api.render(QUESTIONS[0], picture, retention=0.111))
    processor = api.renderer.mm_processor
    calls: list[int] = []
    stock = processor._apply_hf_processor_main

    def counted(mm_items: Any, hf_kwargs: Any) -> Any:
        calls.append(sum(mm_items.get_all_counts().values()))
        return stock(mm_items, hf_kwargs)

    monkeypatch.setattr(processor, "_apply_hf_processor_main", counted)
    api.deliver(api.render(QUESTIONS[1], picture, retention=0.111))
    assert sum(calls) == 0


def test_unpruned_and_pruned_requests_share_no_item(api: Api, uncached: Api) -> None:
    picture = picture_of("square", 3)
    for retention in (0.111, 1.0, 0.111, 1.0):
        request = api.deliver(api.render(QUESTIONS[0], picture, retention=retention))
        assert_equal(request, uncached.render(QUESTIONS[0], picture, retention=retention))


def test_a_name_given_to_two_images_mixes_up_no_contents(api: Api) -> None:
    first, second = picture_of("square", 4), picture_of("square", 5)
    contents = [
        spec_in(api.deliver(api.render(QUESTIONS[0], picture, retention=0.111))).content
        for picture in (first, second)
    ]
    api.deliver(api.render(QUESTIONS[0], first, retention=0.111, uuid="name"))
    for question in QUESTIONS:
        request = api.deliver(api.render(question, second, retention=0.111, uuid="name"))
        pixels = request.mm_features[0].data["pixel_values"].data
        known = api.deliver(api.render(question, second, retention=0.111))
        is_second = torch.equal(pixels, known.mm_features[0].data["pixel_values"].data)
        # vLLM takes the client's word for what it has; the key goes with the pixels.
        assert spec_in(request).content == contents[is_second]


def test_random_requests_of_which_many_are_lost_or_late(folder: Path, uncached: Api) -> None:
    generator = random.Random(1)
    pictures = [picture_of("square", seed) for seed in range(14)]
    # Room for sixteen in the engine and twelve in what the API process knows of it: more than
    # that is asked for, and fewer than the difference are on their way at a time.
    api = Api(folder, cache_gb=16.5 * PICTURE_BYTES / 2**30)
    expected: dict[Any, Any] = {}
    waiting: list[tuple[Any, Any]] = []
    num_small = 0
    for _ in range(200):
        seed = generator.randrange(len(pictures))
        wish = (generator.choice(QUESTIONS), seed, generator.choice((0.05, 0.111, 1.0)))
        question, _, retention = wish
        if wish not in expected:
            expected[wish] = uncached.render(question, pictures[seed], retention=retention)
        waiting.append((api.render(question, pictures[seed], retention=retention), wish))
        while len(waiting) > generator.randrange(4):
            request, wish = waiting.pop(generator.randrange(len(waiting)))
            if generator.random() < 0.2:
                continue  # its client left
            data = request.mm_features[0].data
            num_small += data is None or "pixel_values" not in data
            assert_equal(api.deliver(request), expected[wish])
    assert num_small > 20
    api.renderer._mm_processor_cache.clear_cache()
    api.renderer.shutdown()


def test_a_cache_of_processors_alone_gives_each_question_its_spec(
    api: Api, uncached: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = MultiModalProcessorOnlyCache(api.config.model_config)
    monkeypatch.setattr(api.renderer, "_mm_processor_cache", cache)
    picture = picture_of("square", 6)
    for question in QUESTIONS:
        for retention in (0.111, 0.333, 1.0):
            request = api.render(question, picture, retention=retention)
            assert_equal(request, uncached.render(question, picture, retention=retention))
    # One for pruned and one for unpruned requests.
    assert len(cache._cache) == 2

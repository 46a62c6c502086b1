"""What the API process believes of the engine's cache when requests do not arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from vllm.multimodal.cache import LruKeyReplicatedReceiverCache
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.engine.core_client import AsyncMPClient, SyncMPClient

from msdg_vllm.engine.api import delivery
from msdg_vllm.engine.api.delivery import DeliverySenderCache

UPDATES: list[Any] = []
KILOBYTE = 1024


class Wire:
    """Both caches, and the requests between them."""

    def __init__(self, capacity_kb: float = 1000) -> None:
        delivery.install()
        config = Mock()
        config.get_multimodal_config().mm_processor_cache_gb = capacity_kb * KILOBYTE / 2**30
        self.sender = DeliverySenderCache(config)
        self.receiver = LruKeyReplicatedReceiverCache(config)

    def render(self, *hashes: str) -> list[MultiModalFeatureSpec]:
        """As vLLM's processor uses the cache."""
        cached = self.sender.is_cached(list(hashes))
        for mm_hash in hashes:
            self.sender.touch_sender_cache_item(mm_hash)
        features = []
        for mm_hash, known in zip(hashes, cached, strict=True):
            item = None if known else (picture(), UPDATES)
            data, _ = self.sender.get_and_update_item(item, mm_hash)
            features.append(
                MultiModalFeatureSpec(data, "image", mm_hash, PlaceholderRange(0, 1), mm_hash)
            )
        return features

    def deliver(self, features: list[MultiModalFeatureSpec]) -> None:
        """Send by vLLM's client; raises if the engine misses an item."""
        client = Mock(spec=SyncMPClient, is_dp=False)
        SyncMPClient.add_request(client, Mock(mm_features=features))
        client._send_input.assert_called_once()
        self.receiver.get_and_update_features(features)
        assert all(feature.data is not None for feature in features)


def picture() -> MultiModalKwargsItem:
    pixels = torch.zeros(KILOBYTE, dtype=torch.uint8)
    return MultiModalKwargsItem({"pixels": MultiModalFieldElem(pixels, MultiModalBatchedField())})


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.sender.clear_cache()


def test_an_item_crosses_once(wire: Wire) -> None:
    wire.deliver(wire.render("a"))
    again = wire.render("a")
    assert again[0].data is None
    wire.deliver(again)


def test_an_item_of_a_refused_request_crosses_with_the_next(wire: Wire) -> None:
    refused = wire.render("a")
    del refused
    again = wire.render("a")
    assert again[0].data is not None
    wire.deliver(again)
    assert wire.render("a")[0].data is None


def test_a_request_rendered_before_the_refusal_brings_the_item_too(wire: Wire) -> None:
    refused = wire.render("a")
    other = wire.render("a")
    del refused
    wire.deliver(other)


def test_requests_may_arrive_in_another_order(wire: Wire) -> None:
    first, second = wire.render("a", "b"), wire.render("b", "a")
    wire.deliver(second)
    wire.deliver(first)


def test_a_repeated_item_crosses_once_in_a_request(wire: Wire) -> None:
    refused = wire.render("a", "a")
    for features in (refused, wire.render("a", "a")):
        assert [feature.data is not None for feature in features] == [True, False]
    wire.deliver(refused)


def test_the_asynchronous_client_notes_what_it_sends(wire: Wire) -> None:
    features = wire.render("a")
    client = Mock(spec=AsyncMPClient, client_index=0)

    async def send(*_: object) -> None: ...

    client._send_input = send
    asyncio.run(AsyncMPClient.add_request_async(client, Mock(mm_features=features)))
    del features
    assert wire.render("a")[0].data is None


def test_the_engine_remembers_longer_than_the_api_process() -> None:
    wire = Wire(capacity_kb=40)
    for round_ in range(20):
        requests = [wire.render(f"{round_}-{index}") for index in range(4)]
        requests += [wire.render(f"{max(0, round_ - 5)}-{index}") for index in range(4)]
        for features in reversed(requests):
            wire.deliver(features)
    wire.sender.clear_cache()


def test_lost_items_are_forgotten(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_MAX_UNDELIVERED", 10)
    for index in range(100):
        wire.render(str(index))
    assert len(delivery._undelivered) <= 10

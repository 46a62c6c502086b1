"""Images that were rendered but never reached the engine.

Fills a gap: vLLM's API process notes an image as known to the engine when it renders it. If that
request is then refused (queue full, bad sampling parameter) or its client leaves, the next request
with the same image is sent without it and fails, whoever sent it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, ref

from vllm.config import ModelConfig
from vllm.multimodal.cache import LruKeyReplicatedSenderCache
from vllm.multimodal.cache.base import MultiModalCache, MultiModalProcessorCacheItemMetadata
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import (
    AsyncMPClient,
    DPAsyncMPClient,
    InprocClient,
    SyncMPClient,
)

from msdg_vllm.engine.hooks import wrap
from msdg_vllm.engine.spec import is_field_name

_CAPACITY_SHARE = 0.75
"""Size of the API process's record of the engine's cache, as a share of that cache.

Requests reach the engine in another order than they were rendered, so both forget images in
another order too. The engine must be the one that remembers longer.
"""

_MAX_HELD = 256
_MAX_UNDELIVERED = 4096

_undelivered: dict[str, ReferenceType[MultiModalKwargsItem]] = {}
"""Rendered items that no request has brought to the engine yet, by hash.

An entry whose item is gone belonged to requests that all ended before that.
"""


class DeliverySenderCache(LruKeyReplicatedSenderCache):
    """vLLM's record of what the engine has, corrected for what was never delivered."""

    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__(model_config)
        capacity = model_config.get_multimodal_config().mm_processor_cache_gb
        self._cache = MultiModalCache.get_lru_cache(
            capacity * _CAPACITY_SHARE, MultiModalProcessorCacheItemMetadata
        )
        # Undelivered items that a request being rendered will bring, so that they stay alive.
        self._held: dict[str, MultiModalKwargsItem] = {}

    def is_cached_item(self, mm_hash: str) -> bool:
        """Whether an item needs no processing; one that was lost on the way does."""
        if (reference := _undelivered.get(mm_hash)) is not None:
            item = reference()
            if item is None:
                self.invalidate(mm_hash)
                return False
            if len(self._held) >= _MAX_HELD:  # left behind by requests that failed half way
                self._held.clear()
            self._held[mm_hash] = item
        return super().is_cached_item(mm_hash)

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        """Return what to send: nothing for what the engine has, the item for all else."""
        item, updates = super().get_and_update_item(mm_item, mm_hash)
        if item is None:
            # Once per request: its other places with this image then find it in the engine.
            return self._held.pop(mm_hash, None), updates
        if len(_undelivered) >= _MAX_UNDELIVERED:
            for lost in [key for key, kept in _undelivered.items() if kept() is None]:
                self.invalidate(lost)
        _undelivered[mm_hash] = ref(item)
        return item, updates

    def invalidate(self, mm_hash: str) -> None:
        """Forget an item, so that the next request brings it."""
        super().invalidate(mm_hash)
        _undelivered.pop(mm_hash, None)
        self._held.pop(mm_hash, None)

    def clear_cache(self) -> None:
        """Forget all items."""
        super().clear_cache()
        _undelivered.clear()
        self._held.clear()


def install() -> None:
    """Note what the clients of the engine send; again changes nothing."""
    for client in (InprocClient, SyncMPClient):
        wrap(client, "add_request", _send_and_note)
    for client in (AsyncMPClient, DPAsyncMPClient):
        wrap(client, "add_request_async", _send_and_note_async)


def _send_and_note(send: Callable[..., None], self: Any, request: EngineCoreRequest) -> None:
    delivered = _hashes_of(request)
    send(self, request)
    _note(delivered)


async def _send_and_note_async(
    send: Callable[..., Any], self: Any, request: EngineCoreRequest
) -> None:
    delivered = _hashes_of(request)
    await send(self, request)
    _note(delivered)


def _hashes_of(request: EngineCoreRequest) -> list[str]:
    """Hashes of the items that a request brings; a spec alone brings none."""
    return [
        feature.mm_hash or feature.identifier
        for feature in request.mm_features or ()
        if feature.data is not None and not all(map(is_field_name, feature.data))
    ]


def _note(hashes: list[str]) -> None:
    for mm_hash in hashes:
        _undelivered.pop(mm_hash, None)

"""Pixels are processed once and cross to the engine once, whatever is asked about them.

Fills a gap: vLLM knows the pixels of an item by the same hash as its tokens, and another question
keeps other tokens. Here pixels have a hash of their own in the caches of both processes, and a spec
travels beside them, or alone where the engine has the pixels. vLLM's cache in shared memory stays
as it is: there pixels go with each question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from vllm.multimodal.cache import LruKeyReplicatedReceiverCache, MultiModalProcessorOnlyCache
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)

from msdg_vllm.engine.spec import PruningSpec, field_name, is_field_name

PIXELS = "msdg_pixels"
"""Key under which a processed prompt has the hashes of its pixels, by the hashes of its items."""


def shares_pixels(inputs: Any, modality: str, index: int) -> bool:
    """Whether what a cache holds of an item serves all questions about it.

    Not of an item that a client gave a name: what it called so before may have been another image.
    """
    # Only now: it imports the engine's modules, and this one is imported by them.
    from msdg_vllm.engine.api.delivery import DeliverySenderCache

    names = (inputs.mm_uuid_items or {}).get(modality)
    return not (names and names[index]) and isinstance(
        inputs.cache, DeliverySenderCache | MultiModalProcessorOnlyCache
    )


def with_spec(
    item: MultiModalKwargsItem | None, modality: str, spec: PruningSpec, *, shared: bool
) -> MultiModalKwargsItem | None:
    """The item with its own spec; the spec alone for an item that the engine has.

    What is in a cache belongs to other requests too and is left as it is.
    """
    name, row = field_name(modality), spec.to_tensor()
    if not shared and (item is None or name in item):
        return item
    if item is not None and name in item and torch.equal(torch.as_tensor(item[name].data), row):
        return item
    own = MultiModalFieldElem(row, MultiModalBatchedField(keep_on_cpu=True))
    return MultiModalKwargsItem({**(item or {}), name: own})


def name_pixels(features: list[MultiModalFeatureSpec], hashes: Mapping[str, str]) -> None:
    """Have the engine's cache know pixels by their own hash; tokens keep theirs."""
    for feature in features:
        if feature.mm_hash is not None:
            feature.mm_hash = hashes.get(feature.mm_hash, feature.mm_hash)


def install() -> None:
    """Let the engine put specs and the pixels it has together; again changes nothing."""
    stock = LruKeyReplicatedReceiverCache.get_and_update_item
    if not hasattr(stock, "__wrapped__"):
        LruKeyReplicatedReceiverCache.get_and_update_item = _joining(stock)  # type: ignore[method-assign]


def _joining(stock: Callable[..., MultiModalKwargsItem]) -> Callable[..., MultiModalKwargsItem]:
    @wraps(stock)
    def get_and_update_item(
        self: Any, mm_item: MultiModalKwargsItem | None, mm_hash: str
    ) -> MultiModalKwargsItem:
        if mm_item is None or not _is_spec(mm_item):
            return stock(self, mm_item, mm_hash)
        return MultiModalKwargsItem({**stock(self, None, mm_hash), **mm_item})

    return get_and_update_item


def _is_spec(item: Mapping[str, Any] | None) -> bool:
    return bool(item) and all(map(is_field_name, item or ()))

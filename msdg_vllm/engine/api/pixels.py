"""Pixels are processed once and cross to the engine once, whatever is asked about them.

Fills a gap: vLLM knows the pixels of an item by the same hash as its tokens, and another question
keeps other tokens. Here pixels have a hash of their own in the caches of both processes, and a spec
travels beside them, or alone where the engine has the pixels. vLLM's cache in shared memory stays
as it is: there pixels go with each question.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from vllm.multimodal.cache import LruKeyReplicatedReceiverCache, MultiModalProcessorOnlyCache
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)

from msdg_vllm.engine.hooks import wrap
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
    wrap(LruKeyReplicatedReceiverCache, "get_and_update_item", _join)


def _join(
    stock: Callable[..., MultiModalKwargsItem],
    self: Any,
    mm_item: MultiModalKwargsItem | None,
    mm_hash: str,
) -> MultiModalKwargsItem:
    if mm_item and all(map(is_field_name, mm_item)):
        return MultiModalKwargsItem({**stock(self, None, mm_hash), **mm_item})
    return stock(self, mm_item, mm_hash)


def content_key(mm_hash: str, salt: str) -> int:
    """Return a number of 126 bits, not 0, for an item's hash by content; salts have others."""
    separate = hashlib.blake2b(salt.encode(), digest_size=32).digest() if salt else b""
    digest = hashlib.blake2b(mm_hash.encode(), digest_size=16, key=separate)
    return (int.from_bytes(digest.digest()) >> 2) or 1


def content_number(media: Any) -> int:
    """Return a number of 63 bits that equal pixels share.

    vLLM's own hashes know a file from its pixels, and are replaced by numbers of requests where
    nothing is cached.
    """
    frames = media[0] if isinstance(media, tuple) else media  # videos come with metadata
    if isinstance(frames, Image.Image):
        frames = frames.convert("RGB")
    pixels = np.ascontiguousarray(frames)
    digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=8)
    digest.update(pixels.data)
    return int.from_bytes(digest.digest()) >> 1

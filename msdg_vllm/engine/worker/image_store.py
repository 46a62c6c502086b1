"""What is left of images that the encoder has seen, for the next question about them.

By an image's content, never by a question: its tokens, and what methods found out about it before
they were asked anything. A request whose image is here costs a selection and its prefill.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import torch

from msdg_vllm.engine.spec import PruningSpec
from msdg_vllm.engine.worker.host_store import HostStore
from msdg_vllm.engine.worker.selection import AnalyzedImage, EncodedImage, Findings
from msdg_vllm.methods import Encoder, Selection, method_named

MAX_SELECTIONS = 2**15
MAX_SELECTION_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class StoredImage:
    """One image without a question.

    Attributes:
        rows: What the model makes its tokens of, `(tiles, N, ..)`.
        findings: What was found out about it.
    """

    rows: torch.Tensor
    findings: Findings = field(default_factory=dict)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> StoredImage:
        """Return the image with `function` applied to each tensor."""
        return StoredImage(
            function(self.rows),
            {
                key: [None if tile is None else tile.map(function) for tile in tiles]
                for key, tiles in self.findings.items()
            },
        )


class ImageStore:
    """Images by content; 0 bytes keep none."""

    def __init__(
        self, max_bytes: int, encoder: Encoder | None = None, *, pinned: bool = False
    ) -> None:
        self._images: HostStore[StoredImage] = HostStore(max_bytes, pinned=pinned)
        self._encoder = encoder
        self.hits = 0
        self.misses = 0

    def serves(self, spec: PruningSpec) -> bool:
        """Whether an image is one to keep, for a method that can go on from what is kept."""
        return bool(
            self._images.max_bytes
            and self._encoder is not None
            and spec.content
            and method_named(spec.method).can_resume(self._encoder)
        )

    def has(self, spec: PruningSpec) -> bool:
        """Whether there is all that a request needs of its image."""
        if not self.serves(spec) or (image := self._images.peek(spec.content)) is None:
            return False
        way = (spec.method, spec.scope)
        return way in image.findings or not method_named(spec.method).keeps_findings

    def get(self, content: int, device: torch.device) -> StoredImage:
        """Start copying an image that is there to a device."""
        image = self._images.get(content, device)
        assert image is not None
        return image

    def keep(
        self,
        image: EncodedImage,
        askers: Sequence[PruningSpec],
        analyzed: Sequence[AnalyzedImage],
    ) -> None:
        """Keep an image and what was found out about it, if any who asked can go on from it."""
        if image.rows is None or not any(map(self.serves, askers)):
            return
        content = askers[0].content
        known = self._images.get(content, image.rows.device)
        # Found out from other bits of the same pixels, perhaps: no worse than these.
        findings = {} if known is None else dict(known.findings)
        for one in analyzed:
            method = method_named(one.method)
            if method.keeps_findings:
                findings[one.method, one.scope] = [
                    None if analysis is None else method.findings(analysis)
                    for analysis in one.analyses
                ]
        self._images.put(content, StoredImage(image.rows, findings))

    def clear(self) -> None:
        """Forget all images."""
        self._images.clear()

    def snapshot(self) -> dict[str, int]:
        """Return the counters as plain values that can cross processes."""
        return {
            "image_store_hits": self.hits,
            "image_store_misses": self.misses,
            "image_store_evictions": self._images.evictions,
            "image_store_bytes": self._images.num_bytes,
            "image_store_images": len(self._images),
        }


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to do about the pruned items of a call.

    Attributes:
        kept: Items whose image is in the store.
        askers: The others, by the first of those that ask about one image: it is encoded once.
    """

    kept: frozenset[int]
    askers: Mapping[int, Sequence[int]]

    @classmethod
    def of(cls, specs: Sequence[PruningSpec], store: ImageStore) -> StepPlan:
        """Part the items, and count what the store has and has not."""
        pruned = [index for index, spec in enumerate(specs) if spec.budget]
        kept = frozenset(index for index in pruned if store.has(specs[index]))
        first: dict[int, int] = {}
        askers: defaultdict[int, list[int]] = defaultdict(list)
        for index in pruned:
            if index not in kept:
                content = specs[index].content
                askers[first.setdefault(content, index) if content else index].append(index)
        served = [
            sum(store.serves(specs[index]) for index in indices) for indices in askers.values()
        ]
        store.hits += len(kept) + sum(max(0, count - 1) for count in served)
        store.misses += sum(count > 0 for count in served)
        return cls(kept, dict(askers))


@dataclass(frozen=True, slots=True)
class KeptIndices:
    """Which tokens of an image were kept, `(B,)` int32."""

    indices: torch.Tensor

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> KeptIndices:
        """Return them with `function` applied."""
        return KeptIndices(function(self.indices))


class SelectionMemory:
    """Which tokens were kept, by image, question and budget: a few hundred bytes each.

    An encoder gives an image other bits in another batch, and a tie may then fall the other way.
    An image that is encoded again beside blocks of the KV cache that survived must keep what those
    blocks hold.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._kept: HostStore[KeptIndices] = HostStore(
            MAX_SELECTION_BYTES, max_entries=MAX_SELECTIONS, pinned=pinned
        )

    def settle(self, spec: PruningSpec, selection: Selection) -> Selection:
        """Return what was kept the first time, which is `selection` if this is it.

        Tokens that were merged are no rows of the image: they stay as they are.
        """
        if not spec.content or selection.embeddings is not None:
            return selection
        key = blake2b(spec.selection_identity().encode(), digest_size=16).digest()
        known = self._kept.get(key, selection.indices.device)
        if known is None:
            self._kept.put(key, KeptIndices(selection.indices.int()))
            return selection
        return replace(selection, indices=known.indices.long())

    def clear(self) -> None:
        """Forget all selections."""
        self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)

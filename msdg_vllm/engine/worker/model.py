"""The worker's half: encode images in micro-batches, and keep exactly B rows of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.platform_utils import is_pin_memory_available

from msdg_vllm.core.profiles import EncoderProfile
from msdg_vllm.core.stream import TokenStream
from msdg_vllm.engine import tracing
from msdg_vllm.engine.encoder import PROFILE_FILE, Offer, check_depth, profiled_method
from msdg_vllm.engine.guards import check_config, turn_off_encoder_graphs
from msdg_vllm.engine.hooks import check_vllm
from msdg_vllm.engine.spec import PruningSpec, field_name
from msdg_vllm.engine.worker import resets
from msdg_vllm.engine.worker.explanations import ExplanationStore, TileExplanation, picture_of
from msdg_vllm.engine.worker.image_store import ImageStore, SelectionMemory, StepPlan
from msdg_vllm.engine.worker.lookup import embed_queries
from msdg_vllm.engine.worker.selection import EncodedImage, analyze_images, select_analyzed
from msdg_vllm.engine.worker.statistics import PruningStatistics
from msdg_vllm.methods import Encoder, Needs, Selection, method_named

# Below "vllm", because vLLM configures that logger and no other.
logger = init_logger(f"vllm.{__name__}")


class PruningModel:
    """Mixin for a vLLM model: goes before the stock class in the bases.

    Items without a budget take the stock path untouched; when a step has none with a budget,
    nothing here runs at all.
    """

    modalities: tuple[str, ...] = ("image",)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        can_prune = self.can_prune(vllm_config.model_config.hf_config)
        if can_prune:
            check_config(vllm_config)
            turn_off_encoder_graphs(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        is_traced = vllm_config.observability_config.otlp_traces_endpoint is not None
        self.statistics = PruningStatistics(is_traced=is_traced)
        self.explanations = ExplanationStore()
        # Copies to and from pinned memory do not wait; where there is no device none are made.
        pinned = is_pin_memory_available() and not current_platform.is_cpu()
        self.store, self.selections = ImageStore(0), SelectionMemory(pinned=pinned)
        preprocessing = vllm_config.model_config.hf_image_processor_config
        self.pixel_statistics = preprocessing.get("image_mean"), preprocessing.get("image_std")
        if not can_prune:
            return
        resets.install()
        if is_traced:
            tracing.install_in_worker()
        offer = Offer.of(vllm_config.model_config, self.encoder_of)
        check_depth(offer.profile, len(self.encoder_blocks()))
        self.encoder, settings = offer.encoder, offer.settings
        # A family that cannot make an image again of its rows has it encoded for every question.
        if type(self).kept_item is not PruningModel.kept_item:
            max_bytes = int(settings.image_store_gib * 2**30)
            self.store = ImageStore(max_bytes, self.encoder, pinned=pinned)
        profiled = profiled_method(offer.methods, self.encoder)
        needs = method_named(profiled).needs(self.encoder)
        self.num_profiled_states = max(1, needs.num_held_states)
        # What vLLM's memory profiling ran the tower on: the scheduler counts pruned tokens, so
        # one step can bring many times more images than that.
        self.max_tower_tokens = vllm_config.scheduler_config.max_num_encoder_input_tokens
        logger.info_once(
            "msdg-vllm prunes %s: profile %s, default retention %s, method %s, query mode %s, %s",
            vllm_config.model_config.architecture,
            offer.profile.name if offer.profile else "none",
            settings.default_retention,
            offer.default_method,
            settings.query_mode,
            check_vllm(),
        )
        if offer.profile is None and self.encoder.shows_states:
            logger.warning_once(
                "There is no profile of this vision encoder, so that methods which read one "
                "(msdg) are refused. Make one with `msdg-vllm calibrate`, then start with it as "
                "--profile or put it beside the weights as %s",
                PROFILE_FILE,
            )

    @classmethod
    def can_prune(cls, hf_config: Any) -> bool:
        """Whether a checkpoint of this architecture is one that can be pruned."""
        return True

    @staticmethod
    def encoder_of(hf_config: Any, profile: EncoderProfile | None) -> Encoder:
        """What methods may know of a checkpoint's encoder, from its configuration alone."""
        raise NotImplementedError

    def encoder_blocks(self) -> Sequence[nn.Module]:
        """The blocks of the vision encoder, in order."""
        raise NotImplementedError

    def take_items(
        self, kwargs: Mapping[str, Any], modality: str, indices: Sequence[int]
    ) -> dict[str, Any]:
        """Multi-modal kwargs of some of the items in `kwargs`."""
        raise NotImplementedError

    def num_tower_tokens(
        self, kwargs: Mapping[str, Any], modality: str, index: int, spec: PruningSpec
    ) -> int:
        """Tokens of an item while it is in the encoder, padding included."""
        return spec.num_tokens

    def encode_items(
        self, kwargs: Mapping[str, Any], modality: str, needs: Needs
    ) -> Iterable[Sequence[EncodedImage]]:
        """Encode and project items, in order, with the signals that `needs` names.

        Images that come together are analysed together.
        """
        raise NotImplementedError

    def kept_item(
        self, kwargs: Mapping[str, Any], modality: str, index: int, rows: torch.Tensor
    ) -> EncodedImage:
        """Make an item again of the `rows` that `encode_items` gave it, without the encoder."""
        raise NotImplementedError

    def token_stream(
        self, needs: Needs, *, order: torch.Tensor | None = None, copies: bool = False
    ) -> TokenStream | None:
        """What reduces the encoder's states on the way, if a method reads the signals of tokens."""
        if not needs.token_signals:
            return None
        encoder = self.encoder
        return TokenStream(encoder.measured, encoder.patches_per_token, order=order, copies=copies)

    def get_encoder_cudagraph_config(self) -> Any:
        stock: Any = super()
        return replace(stock.get_encoder_cudagraph_config(), modalities=[])

    def load_weights(self, weights: Any) -> Any:
        loaded = super().load_weights(weights)  # type: ignore[misc]
        self.forget_images()
        return loaded

    def forget_images(self) -> None:
        """Drop what is known of images: it does not hold for other weights."""
        self.store.clear()
        self.selections.clear()

    def embed_multimodal(self, **kwargs: Any) -> Any:
        for modality in self.modalities:
            if (rows := kwargs.pop(field_name(modality), None)) is not None:
                specs = [PruningSpec.from_tensor(row) for row in rows]
                if any(spec.budget for spec in specs):
                    return self._embed_pruned(kwargs, modality, specs)
        return super().embed_multimodal(**kwargs)  # type: ignore[misc]

    def _embed_pruned(
        self, kwargs: dict[str, Any], modality: str, specs: Sequence[PruningSpec]
    ) -> list[torch.Tensor]:
        embeddings: dict[int, torch.Tensor] = {}
        if stock := [index for index, spec in enumerate(specs) if not spec.budget]:
            outputs = super().embed_multimodal(  # type: ignore[misc]
                **self.take_items(kwargs, modality, stock)
            )
            embeddings.update(zip(stock, outputs, strict=True))
        sizes = [
            self.num_tower_tokens(kwargs, modality, index, spec) if spec.budget else 0
            for index, spec in enumerate(specs)
        ]
        plan = StepPlan.of(specs, self.store)
        # First what is kept: what comes out of the encoder may take its place.
        for batch in self._micro_batches(
            [size if index in plan.kept else 0 for index, size in enumerate(sizes)]
        ):
            images = [self._kept_image(kwargs, modality, index, specs[index]) for index in batch]
            asked = [[specs[index]] for index in batch]
            rows = self.select_rows(images, asked, self._queries(asked), encoded=False)
            embeddings.update(zip(batch, rows, strict=True))
        groups = {
            first: [specs[index] for index in askers] for first, askers in plan.askers.items()
        }
        num_tokens = [
            self._weight(groups[index]) * size if index in groups else 0
            for index, size in enumerate(sizes)
        ]
        for batch in self._micro_batches(num_tokens):
            rows = self._embed_micro_batch(
                self.take_items(kwargs, modality, batch),
                modality,
                [groups[first] for first in batch],
            )
            askers = [index for first in batch for index in plan.askers[first]]
            embeddings.update(zip(askers, rows, strict=True))
        return [embeddings[index] for index in range(len(specs))]

    def _needs(self, spec: PruningSpec) -> Needs:
        needs = method_named(spec.method).needs(self.encoder)
        return replace(needs, query=needs.query and bool(spec.query_ids))

    def _weight(self, specs: Sequence[PruningSpec]) -> int:
        """How many times the states that were profiled an image's askers hold, rounded up."""
        needs = reduce(or_, map(self._needs, specs))
        return max(1, -(-needs.num_held_states // self.num_profiled_states))

    def _micro_batches(self, num_tokens: Sequence[int]) -> Iterator[list[int]]:
        """Pruned items in runs whose tokens in the tower fit what was profiled."""
        batch: list[int] = []
        total = 0
        for index, count in enumerate(num_tokens):
            if not count:
                continue
            if batch and total + count > self.max_tower_tokens:
                yield batch
                batch, total = [], 0
            batch.append(index)
            total += count
        if batch:
            yield batch

    def _queries(self, asked: Sequence[Sequence[PruningSpec]]) -> list[torch.Tensor | None]:
        language_model = self.get_language_model()  # type: ignore[attr-defined]
        return embed_queries(language_model, [spec.query_ids for own in asked for spec in own])

    def _kept_image(
        self, kwargs: Mapping[str, Any], modality: str, index: int, spec: PruningSpec
    ) -> EncodedImage:
        device = next(self.encoder_blocks()[0].parameters()).device
        stored = self.store.get(spec.content, device)
        image = self.kept_item(kwargs, modality, index, stored.rows)
        return replace(image, findings=stored.findings)

    def _embed_micro_batch(
        self, kwargs: dict[str, Any], modality: str, asked: Sequence[Sequence[PruningSpec]]
    ) -> list[torch.Tensor]:
        queries = self._queries(asked)
        needs = reduce(or_, (self._needs(spec) for own in asked for spec in own))
        rows: list[torch.Tensor] = []
        num_images = 0
        for images in self.encode_items(kwargs, modality, needs):
            here = asked[num_images : num_images + len(images)]
            num_images += len(images)
            own = queries[len(rows) : len(rows) + sum(map(len, here))]
            rows += self.select_rows(images, here, own, encoded=True)
        self.statistics.count_encoder_run(num_images)
        return rows

    def select_rows(
        self,
        images: Sequence[EncodedImage],
        asked: Sequence[Sequence[PruningSpec]],
        queries: Sequence[torch.Tensor | None],
        *,
        encoded: bool,
    ) -> list[torch.Tensor]:
        """Exactly `spec.budget` embeddings for each who asks about an image, image by image."""
        each = [image for image, own in zip(images, asked, strict=True) for _ in own]
        specs = [spec for own in asked for spec in own]
        device = images[0].visual.device
        with self.statistics.measure_selection(device, specs, encoded=encoded):
            analyzed = analyze_images(each, specs, self.encoder)
            selections = [
                self.selections.settle(spec, selection)
                for spec, selection in zip(
                    specs, select_analyzed(analyzed, specs, queries), strict=True
                )
            ]
            rows = [
                image.rows_of(selection) for image, selection in zip(each, selections, strict=True)
            ]
        for image, spec, selection in zip(each, specs, selections, strict=True):
            if spec.explanation:
                self._explain(image, spec, selection, encoded=encoded)
        if encoded:
            by_image = iter(analyzed)
            for image, own in zip(images, asked, strict=True):
                self.store.keep(image, own, [next(by_image) for _ in own])
        return rows

    def _explain(
        self, image: EncodedImage, spec: PruningSpec, selection: Selection, *, encoded: bool
    ) -> None:
        """Keep what was selected from an image, tile by tile, for whoever asks."""
        layout = image.layout
        shape = (layout.num_tiles, layout.tokens_per_tile)
        places = torch.zeros(shape, dtype=torch.bool, device=selection.indices.device)
        kept = places.view(-1).scatter(0, selection.indices, True).view(shape)

        def of_tile(values: torch.Tensor | None, tile: int) -> torch.Tensor | None:
            return None if values is None else values.view(shape)[tile]

        for tile in range(layout.num_tiles):
            self.explanations.keep(
                spec.explanation,
                TileExplanation(
                    item=spec.item,
                    tile=tile,
                    grid=layout.tile_grid,
                    frames=len(layout.grids) if layout.num_tiles == 1 else 1,
                    encoded=encoded,
                    kept=kept[tile],
                    groups=of_tile(selection.groups, tile),
                    sinks=of_tile(selection.sinks, tile),
                    scores=of_tile(selection.scores, tile),
                    picture=None
                    if image.pixels is None
                    else picture_of(image.pixels[tile], *self.pixel_statistics),
                ),
            )

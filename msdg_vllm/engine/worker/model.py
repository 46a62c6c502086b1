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

from msdg_vllm.core.profiles import EncoderProfile
from msdg_vllm.engine.encoder import PROFILE_FILE, check_depth, default_method, profile_of
from msdg_vllm.engine.guards import check_config, turn_off_encoder_graphs
from msdg_vllm.engine.hooks import check_vllm
from msdg_vllm.engine.spec import PruningSpec, field_name
from msdg_vllm.engine.worker.explanations import ExplanationStore, TileExplanation, picture_of
from msdg_vllm.engine.worker.lookup import embed_queries
from msdg_vllm.engine.worker.selection import EncodedImage, select_tokens
from msdg_vllm.engine.worker.statistics import PruningStatistics
from msdg_vllm.methods import Encoder, Needs, Selection, method_named
from msdg_vllm.settings import Settings

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
        self.statistics = PruningStatistics()
        self.explanations = ExplanationStore()
        preprocessing = vllm_config.model_config.hf_image_processor_config
        self.pixel_statistics = preprocessing.get("image_mean"), preprocessing.get("image_std")
        if not can_prune:
            return
        settings = Settings.from_environment()
        found = profile_of(vllm_config.model_config, settings)
        check_depth(found, len(self.encoder_blocks()))
        self.encoder = self.encoder_of(vllm_config.model_config.hf_config, found and found.profile)
        method = default_method(settings, found)
        # Memory is profiled on the default method.
        self.num_profiled_states = max(1, len(method_named(method).needs(self.encoder).states))
        # What vLLM's memory profiling ran the tower on: the scheduler counts pruned tokens, so
        # one step can bring many times more images than that.
        self.max_tower_tokens = vllm_config.scheduler_config.max_num_encoder_input_tokens
        logger.info_once(
            "msdg-vllm prunes %s: profile %s, default retention %s, method %s, query mode %s, %s",
            vllm_config.model_config.architecture,
            found.name if found else "none",
            settings.default_retention,
            method,
            settings.query_mode,
            check_vllm(),
        )
        if found is None:
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

    def get_encoder_cudagraph_config(self) -> Any:
        stock: Any = super()
        return replace(stock.get_encoder_cudagraph_config(), modalities=[])

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
        num_tokens = [
            self._weight(spec) * self.num_tower_tokens(kwargs, modality, index, spec)
            if spec.budget
            else 0
            for index, spec in enumerate(specs)
        ]
        for batch in self._micro_batches(num_tokens):
            kept = self._embed_micro_batch(
                self.take_items(kwargs, modality, batch),
                modality,
                [specs[index] for index in batch],
            )
            embeddings.update(zip(batch, kept, strict=True))
        return [embeddings[index] for index in range(len(specs))]

    def _needs(self, spec: PruningSpec) -> Needs:
        needs = method_named(spec.method).needs(self.encoder)
        return replace(needs, query=needs.query and bool(spec.query_ids))

    def _weight(self, spec: PruningSpec) -> int:
        """How many times the states that were profiled a method holds, rounded up."""
        return max(1, -(-len(self._needs(spec).states) // self.num_profiled_states))

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

    def _embed_micro_batch(
        self, kwargs: dict[str, Any], modality: str, specs: Sequence[PruningSpec]
    ) -> list[torch.Tensor]:
        language_model = self.get_language_model()  # type: ignore[attr-defined]
        queries = embed_queries(language_model, [spec.query_ids for spec in specs])
        needs = reduce(or_, map(self._needs, specs))
        kept: list[torch.Tensor] = []
        for images in self.encode_items(kwargs, modality, needs):
            here = slice(len(kept), len(kept) + len(images))
            with self.statistics.measure_selection(images[0].visual.device):
                kept += self.keep_tokens(images, specs[here], queries[here])
        self.statistics.count_encoder_run(len(specs))
        return kept

    def keep_tokens(
        self,
        images: Sequence[EncodedImage],
        specs: Sequence[PruningSpec],
        queries: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor]:
        """Exactly `spec.budget` embeddings of each image."""
        selections = select_tokens(images, specs, queries, self.encoder)
        for image, spec, selection in zip(images, specs, selections, strict=True):
            if spec.explanation:
                self._explain(image, spec, selection)
        return [
            image.rows_of(selection) for image, selection in zip(images, selections, strict=True)
        ]

    def _explain(self, image: EncodedImage, spec: PruningSpec, selection: Selection) -> None:
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
                    kept=kept[tile],
                    groups=of_tile(selection.groups, tile),
                    sinks=of_tile(selection.sinks, tile),
                    scores=of_tile(selection.scores, tile),
                    picture=None
                    if image.pixels is None
                    else picture_of(image.pixels[tile], *self.pixel_statistics),
                ),
            )

"""The worker's half: encode in micro-batches, capture, analyse, select, keep exactly B rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d

from msdg_vllm.core.profiles import EncoderProfile
from msdg_vllm.engine.encoder import check_depth, profile_of
from msdg_vllm.engine.hooks import check_vllm
from msdg_vllm.engine.spec import PruningSpec, field_name
from msdg_vllm.engine.worker.choosing import Wish, choose_tokens
from msdg_vllm.engine.worker.explanations import ExplanationStore, TileExplanation, picture_of
from msdg_vllm.engine.worker.statistics import PruningStatistics
from msdg_vllm.methods import Choice, Encoder, ImageBatch, Needs, Signals, method_named
from msdg_vllm.settings import Settings

# Below "vllm", because vLLM configures that logger and no other.
logger = init_logger(f"vllm.{__name__}")


@dataclass(slots=True)
class EncodedImages:
    """Images of one size, encoded together.

    Attributes:
        signals: What the encoder gave, `(images, N * patches_per_token, ..)`.
        visual: Projected tokens, `(images, N, D)`.
        grids: Rows and columns of the grids that the N tokens form, one after the other; empty
            when they form none.
        columns: What each kept token carries behind its embedding to the model runner,
            `(images, N, C)`; None carries nothing.
        pixels: What the encoder saw, `(images, 3, H, W)`, for explanations; or an object that
            makes an image's `(3, H, W)` when it is indexed.
        project: The projector, for methods that merge in front of it; None when it cannot take
            single patches.
    """

    signals: Signals
    visual: torch.Tensor
    grids: Sequence[tuple[int, int]] = ()
    columns: torch.Tensor | None = None
    pixels: Any = None
    project: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def grid(self) -> tuple[int, int] | None:
        """Rows and columns of all tokens, the grids one below the other; None without grids."""
        return (sum(rows for rows, _ in self.grids), self.grids[0][1]) if self.grids else None

    def pop_signals(self) -> Signals:
        """Hand the signals over: whoever takes them decides how long the states live."""
        signals, self.signals = self.signals, Signals()
        return signals


class PruningModel:
    """Mixin for a vLLM model: goes before the stock class in the bases.

    Items without a budget take the stock path untouched; when a step has none with a budget,
    nothing here runs at all.
    """

    modalities: tuple[str, ...] = ("image",)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        self.statistics = PruningStatistics()
        self.explanations = ExplanationStore()
        preprocessing = vllm_config.model_config.hf_image_processor_config
        self.pixel_statistics = preprocessing.get("image_mean"), preprocessing.get("image_std")
        if not self.can_prune(vllm_config.model_config.hf_config):
            return
        settings = Settings.from_environment()
        name, profile = profile_of(vllm_config.model_config, settings)
        check_depth(name, profile, len(self.encoder_blocks()))
        self.encoder = self.encoder_of(vllm_config.model_config.hf_config, profile)
        # What vLLM's memory profiling ran the tower on: the scheduler counts pruned tokens, so
        # one step can bring many times more images than that.
        self.max_tower_tokens = vllm_config.scheduler_config.max_num_encoder_input_tokens
        logger.info_once(
            "msdg-vllm prunes %s: profile %s, default retention %s, method %s, query mode %s, %s",
            vllm_config.model_config.architecture,
            name,
            settings.default_retention,
            settings.default_method,
            settings.query_mode,
            check_vllm(),
        )

    @classmethod
    def can_prune(cls, hf_config: Any) -> bool:
        """Whether a checkpoint of this architecture is one that can be pruned."""
        return True

    @staticmethod
    def encoder_of(hf_config: Any, profile: EncoderProfile) -> Encoder:
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
    ) -> Iterable[EncodedImages]:
        """Encode and project items, in order, with the signals that `needs` names."""
        raise NotImplementedError

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
            chosen = self._embed_micro_batch(
                self.take_items(kwargs, modality, batch),
                modality,
                [specs[index] for index in batch],
            )
            embeddings.update(zip(batch, chosen, strict=True))
        return [embeddings[index] for index in range(len(specs))]

    def _needs(self, spec: PruningSpec) -> Needs:
        return method_named(spec.method).needs(self.encoder)

    def _weight(self, spec: PruningSpec) -> int:
        """How many times the states that were profiled a method holds, rounded up."""
        return max(1, -(-len(self._needs(spec).states) // len(self.encoder.profile.layers)))

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
        queries = self._embed_queries(specs)
        needs = reduce(or_, map(self._needs, specs))
        kept: list[torch.Tensor] = []
        for images in self.encode_items(kwargs, modality, needs):
            start = len(kept)
            with self.statistics.measure_selection(images.visual.device):
                kept += self.keep_tokens(images, specs[start:], queries[start:])
        self.statistics.count_encoder_run(len(specs))
        return kept

    def keep_tokens(
        self,
        images: EncodedImages,
        specs: Sequence[PruningSpec],
        queries: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Exactly `spec.budget` embeddings of each image; `specs` may go on behind the images."""
        num_images = len(images.visual)
        wishes = [
            Wish(spec.method, spec.budget, spec.query_ids, query)
            for spec, query in zip(specs[:num_images], queries[:num_images], strict=True)
        ]
        choices = choose_tokens(
            ImageBatch(
                signals=images.pop_signals(),
                visual=images.visual,
                encoder=self.encoder,
                grids=[images.grids] * num_images,
                seeds=[spec.seed for spec in specs[:num_images]],
                places=[None] * num_images,
                project=images.project,
            ),
            wishes,
        )
        kept = []
        for row, choice in enumerate(choices):
            if specs[row].explanation and images.grid is not None:
                self.explain(
                    specs[row],
                    images.grid,
                    choice,
                    None if images.pixels is None else images.pixels[row],
                )
            embeddings = choice.embeddings
            if embeddings is None:
                embeddings = images.visual[row][choice.indices]
            if images.columns is not None:
                columns = images.columns[row][choice.indices].to(embeddings.dtype)
                embeddings = torch.cat([embeddings, columns], dim=-1)
            kept.append(embeddings)
        return kept

    def explain(
        self,
        spec: PruningSpec,
        grid: tuple[int, int],
        choice: Choice,
        pixels: torch.Tensor | None,
        tile: int = 0,
    ) -> None:
        """Keep what was decided about an image, or a tile of it, for whoever asks."""
        picture = None if pixels is None else picture_of(pixels, *self.pixel_statistics)
        self.explanations.keep(
            spec.explanation,
            TileExplanation(
                item=spec.item,
                tile=tile,
                grid=grid,
                kept=choice.indices,
                groups=choice.groups,
                sinks=choice.sinks,
                scores=choice.scores,
                picture=picture,
            ),
        )

    def _embed_queries(self, specs: Sequence[PruningSpec]) -> Sequence[torch.Tensor]:
        """Embeddings of each item's query tokens, `(Q, D)` each, with one look-up for all."""
        language_model = self.get_language_model()  # type: ignore[attr-defined]
        token_ids = async_tensor_h2d(
            [token_id for spec in specs for token_id in spec.query_ids],
            device=next(language_model.parameters()).device,
            dtype=torch.int64,
        )
        embedded = language_model.embed_input_ids(token_ids)
        queries: Sequence[torch.Tensor] = embedded.split([len(spec.query_ids) for spec in specs])
        return queries

"""Mini-Gemini with pruning: signals from the CLIP tower, relevance from the finished tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.multimodal import MULTIMODAL_REGISTRY

from msdg_vllm.engine.spec import PruningSpec
from msdg_vllm.engine.worker.model import EncodedImages
from msdg_vllm.engine.worker.tiles import EncodedTiles, TiledPruningModel, TileLayout
from msdg_vllm.methods import Needs
from msdg_vllm.models import clip
from msdg_vllm.models.mini_gemini.images import MEAN, STD
from msdg_vllm.models.mini_gemini.mining import squares_of
from msdg_vllm.models.mini_gemini.model import MiniGemini
from msdg_vllm.models.mini_gemini.processor import (
    MiniGeminiDummyInputs,
    MiniGeminiProcessingInfo,
    PruningMiniGeminiProcessor,
    layout_of,
)


@dataclass(slots=True)
class HalfEncodedImage(EncodedTiles):
    """One image before mining: `visual` holds CLIP features, `(T, N, d)`.

    Attributes:
        maps: High-resolution maps behind each tile, `(T, C, H, W)`.
        needs: What the method reads of it.
    """

    maps: torch.Tensor | None = None
    needs: Needs = field(default_factory=Needs)


@MULTIMODAL_REGISTRY.register_processor(
    PruningMiniGeminiProcessor,
    info=MiniGeminiProcessingInfo,
    dummy_inputs=MiniGeminiDummyInputs,
)
class PruningMiniGemini(TiledPruningModel, MiniGemini):
    """Mini-Gemini that keeps the visual tokens its requests pay for."""

    encoder_of = staticmethod(clip.encoder_of)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # Checkpoints have no preprocessor_config.json to say it.
        self.pixel_statistics = MEAN, STD

    def encoder_blocks(self) -> Sequence[nn.Module]:
        return clip.blocks_of(self.vision_tower)

    def tile_layout(self, kwargs: Mapping[str, Any], index: int) -> TileLayout:
        return layout_of(self.config)

    def take_items(
        self, kwargs: Mapping[str, Any], modality: str, indices: Sequence[int]
    ) -> dict[str, Any]:
        return {
            key: torch.stack([kwargs[key][i] for i in indices])
            for key in ("pixel_values", "pixel_values_aux")
        }

    def encode_items(
        self, kwargs: Mapping[str, Any], modality: str, needs: Needs
    ) -> Iterator[EncodedTiles]:
        for tiles, pixels in zip(kwargs["pixel_values"], kwargs["pixel_values_aux"], strict=True):
            yield self._half_encoded(tiles, pixels, needs)

    def _half_encoded(
        self, tiles: torch.Tensor, pixels: torch.Tensor, needs: Needs
    ) -> HalfEncodedImage:
        with clip.capture(self.vision_tower, needs) as captured:
            features = self.clip_features(tiles)
        return HalfEncodedImage(
            signals=clip.patch_signals(captured, features, needs),
            visual=features,
            layouts=[layout_of(self.config)],
            grids=((self.config.tokens_per_side, self.config.tokens_per_side),),
            pixels=tiles,
            project=self.project,
            maps=self.high_resolution_maps(pixels),
            needs=needs,
        )

    def keep_tokens(
        self,
        images: EncodedImages,
        specs: Sequence[PruningSpec],
        queries: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        assert isinstance(images, HalfEncodedImage)
        assert images.maps is not None
        features, maps = images.visual, images.maps
        needs = images.needs
        if specs[0].query_ids or needs.visual or needs.features:
            # Relevance compares the question with finished tokens, so all must be finished.
            mined = self.mine(features, maps)
            images.visual = self.project(mined).view(*features.shape[:2], -1)
            if needs.features:
                # What the projector is handed, here, is what was mined.
                images.signals = replace(images.signals, features=mined.view_as(features))
            return super().keep_tokens(images, specs, queries)
        (decision,) = self.decide(images, specs, queries)
        tokens = features.flatten(0, 1)[decision.positions]
        squares = self._squares_behind(maps, decision.positions)
        return [self.project(self.mining(tokens, squares))]

    def _squares_behind(self, maps: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The squares of some of an image's tokens, `(B, positions, C)`: no other is copied."""
        side = self.config.tokens_per_side
        tile, token = positions // (side * side), positions % (side * side)
        return squares_of(maps, side)[tile, token // side, token % side].flatten(1, 2)

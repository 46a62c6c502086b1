"""Mini-Gemini with pruning: signals from the CLIP tower, relevance from the finished tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.multimodal import MULTIMODAL_REGISTRY

from msdg_vllm.engine.embedding import EncodedImages
from msdg_vllm.engine.spec import PruningSpec
from msdg_vllm.engine.states import capture_states
from msdg_vllm.engine.tiles import EncodedTiles, TiledPruningModel, TileLayout
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
    """

    maps: torch.Tensor | None = None


@MULTIMODAL_REGISTRY.register_processor(
    PruningMiniGeminiProcessor,
    info=MiniGeminiProcessingInfo,
    dummy_inputs=MiniGeminiDummyInputs,
)
class PruningMiniGemini(TiledPruningModel, MiniGemini):
    """Mini-Gemini that keeps the visual tokens its requests pay for."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # Checkpoints have no preprocessor_config.json to say it.
        self.pixel_statistics = MEAN, STD

    def encoder_blocks(self) -> Sequence[nn.Module]:
        tower: Any = self.vision_tower
        blocks: Sequence[nn.Module] = tower.vision_model.encoder.layers
        return blocks

    def tile_layout(self, kwargs: Mapping[str, Any], index: int) -> TileLayout:
        return layout_of(self.config)

    def take_items(
        self, kwargs: Mapping[str, Any], modality: str, indices: Sequence[int]
    ) -> dict[str, Any]:
        return {
            key: torch.stack([kwargs[key][i] for i in indices])
            for key in ("pixel_values", "pixel_values_aux")
        }

    def encode_items(self, kwargs: Mapping[str, Any], modality: str) -> Iterator[EncodedTiles]:
        for tiles, pixels in zip(kwargs["pixel_values"], kwargs["pixel_values_aux"], strict=True):
            with capture_states(self.encoder_blocks(), self.profile.layers) as states:
                features = self.clip_features(tiles)
            patches = features.shape[1]
            yield HalfEncodedImage(
                # The class token comes first and is no candidate.
                states={layer: state[:, -patches:] for layer, state in states.items()},
                visual=features,
                layouts=[layout_of(self.config)],
                grid=(self.config.tokens_per_side, self.config.tokens_per_side),
                pixels=tiles,
                maps=self.high_resolution_maps(pixels),
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
        if specs[0].query_ids:
            # Relevance compares the question with finished tokens, so all must be finished.
            finished = self.project(self.mine(features, maps))
            images.visual = finished.view(*features.shape[:2], -1)
            (positions,) = self.select_positions(images, specs, queries)
            return [finished[positions]]
        (positions,) = self.select_positions(images, specs, queries)
        tokens = features.flatten(0, 1)[positions]
        return [self.project(self.mining(tokens, self._squares_behind(maps, positions)))]

    def _squares_behind(self, maps: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The squares of some of an image's tokens, `(B, positions, C)`: no other is copied."""
        side = self.config.tokens_per_side
        tile, token = positions // (side * side), positions % (side * side)
        return squares_of(maps, side)[tile, token // side, token % side].flatten(1, 2)

"""Mini-Gemini with pruning: signals from the CLIP tower, relevance from the finished tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.multimodal import MULTIMODAL_REGISTRY

from msdg_vllm.engine.worker.selection import EncodedImage
from msdg_vllm.methods import Needs, Signals
from msdg_vllm.models.clip import ClipModel, capture, patch_signals
from msdg_vllm.models.mini_gemini.images import MEAN, STD
from msdg_vllm.models.mini_gemini.mining import squares_of
from msdg_vllm.models.mini_gemini.model import MiniGemini
from msdg_vllm.models.mini_gemini.processor import (
    MiniGeminiDummyInputs,
    MiniGeminiProcessingInfo,
    PruningMiniGeminiProcessor,
    layout_of,
)


@MULTIMODAL_REGISTRY.register_processor(
    PruningMiniGeminiProcessor,
    info=MiniGeminiProcessingInfo,
    dummy_inputs=MiniGeminiDummyInputs,
)
class PruningMiniGemini(ClipModel, MiniGemini):
    """Mini-Gemini that keeps the visual tokens its requests pay for."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # Checkpoints have no preprocessor_config.json to say it.
        self.pixel_statistics = MEAN, STD

    def take_items(
        self, kwargs: Mapping[str, Any], modality: str, indices: Sequence[int]
    ) -> dict[str, Any]:
        return {
            key: torch.stack([kwargs[key][i] for i in indices])
            for key in ("pixel_values", "pixel_values_aux")
        }

    def encode_items(
        self, kwargs: Mapping[str, Any], modality: str, needs: Needs
    ) -> Iterator[list[EncodedImage]]:
        for tiles, pixels in zip(kwargs["pixel_values"], kwargs["pixel_values_aux"], strict=True):
            yield [self._encoded(tiles, pixels, needs)]

    def _encoded(self, tiles: torch.Tensor, pixels: torch.Tensor, needs: Needs) -> EncodedImage:
        stream = self.token_stream(needs)
        # One class token stands before the patches.
        with capture(self.encoder_blocks(), needs, stream, num_leading=1) as captured:
            features = self.clip_features(tiles)
        maps = self.high_resolution_maps(pixels)
        image = EncodedImage(
            signals=patch_signals(captured, features, needs, stream),
            visual=features,
            layout=layout_of(self.config),
            pixels=tiles,
            project=self.project,
            finish=lambda tokens, positions: self.project(
                self.mining(tokens, self._squares_behind(maps, positions))
            ),
        )
        if not (needs.query or needs.visual or needs.features):
            return image
        # Relevance compares the question with finished tokens, so all must be finished.
        mined = self.mine(features, maps)
        signals = image.signals
        if needs.features:
            # What the projector is handed, here, is what was mined.
            signals = replace(signals, features=mined.view_as(features))
        visual = self.project(mined).view(*features.shape[:2], -1)
        return replace(image, signals=signals, visual=visual, finish=None, rows=visual)

    def kept_item(
        self, kwargs: Mapping[str, Any], modality: str, index: int, rows: torch.Tensor
    ) -> EncodedImage:
        pixels = kwargs["pixel_values"][index]
        return EncodedImage(Signals(), rows, layout_of(self.config), pixels)

    def _squares_behind(self, maps: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The squares of some of an image's tokens, `(B, positions, C)`: no other is copied."""
        side = self.config.tokens_per_side
        tile, token = positions // (side * side), positions % (side * side)
        return squares_of(maps, side)[tile, token // side, token % side].flatten(1, 2)

"""LLaVA-NeXT: the whole image as one tile, and its parts as more tiles of a padded canvas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.models.llava_next.modeling_llava_next import (
    get_anyres_image_grid_shape,
    unpad_image,
)
from vllm.model_executor.models.llava_next import (
    LlavaNextForConditionalGeneration,
    LlavaNextMultiModalProcessor,
)

from msdg_vllm.engine.api.processor import with_processor
from msdg_vllm.engine.layout import TileLayout
from msdg_vllm.engine.spec import PruningSpec
from msdg_vllm.engine.worker.selection import EncodedImage, encoded_images
from msdg_vllm.methods import Needs, Signals
from msdg_vllm.models.clip import ClipModel, ClipProcessor


def layout_of(hf_config: Any, height: int, width: int) -> TileLayout:
    """The tiles of an image: the base tile first, then the canvas that the others make up.

    The canvas is read row by row across its tiles; padding is what stock cuts off it.
    """
    vision_config = hf_config.vision_config
    side = vision_config.image_size // vision_config.patch_size
    rows, columns = get_anyres_image_grid_shape(
        (height, width), hf_config.image_grid_pinpoints, vision_config.image_size
    )
    num_tiles = 1 + rows * columns
    positions = torch.arange(num_tiles * side * side)
    base, rest = positions.tensor_split([side * side])
    canvas = rest.view(rows, columns, side, side).transpose(1, 2)
    canvas = canvas.reshape(rows * side, columns * side)
    real = unpad_image(canvas.unsqueeze(0), (height, width)).squeeze(0)
    return TileLayout.of_order(
        torch.cat([base, real.flatten()]),
        num_tiles,
        side * side,
        grids=((side, side), (real.shape[0], real.shape[1])),
    )


class PruningLlavaNextProcessor(ClipProcessor, LlavaNextMultiModalProcessor):
    """LLaVA-NeXT's processor with a budget per tile."""

    def num_visual_tokens(
        self, items: Any, modality: str, index: int, kwargs: Mapping[str, object]
    ) -> int:
        size = items.get_image_size(index)
        return int(self.info.get_num_image_tokens(image_width=size.width, image_height=size.height))

    def budget(
        self, items: Any, modality: str, index: int, kwargs: Mapping[str, object], retention: float
    ) -> int:
        size = items.get_image_size(index)
        return layout_of(self.info.get_hf_config(), size.height, size.width).budget(retention)


@with_processor(PruningLlavaNextProcessor)
class PruningLlavaNext(ClipModel, LlavaNextForConditionalGeneration):
    """LLaVA-NeXT that keeps the visual tokens its requests pay for."""

    def tile_layout(self, kwargs: Mapping[str, Any], index: int) -> TileLayout:
        """The layout of an image, from what the host knows."""
        # Sizes stay on the host, so reading one waits for no device.
        height, width = kwargs["image_sizes"][index].tolist()
        return layout_of(self.config, height, width)

    def num_tower_tokens(
        self, kwargs: Mapping[str, Any], modality: str, index: int, spec: PruningSpec
    ) -> int:
        return self.tile_layout(kwargs, index).num_places

    def take_items(
        self, kwargs: Mapping[str, Any], modality: str, indices: Sequence[int]
    ) -> dict[str, Any]:
        return {
            # The HF processor fills images up to the tiles of the largest one in the call.
            "pixel_values": [
                kwargs["pixel_values"][i][: self.tile_layout(kwargs, i).num_tiles] for i in indices
            ],
            "image_sizes": torch.stack([kwargs["image_sizes"][i] for i in indices]),
        }

    def encode_items(
        self, kwargs: Mapping[str, Any], modality: str, needs: Needs
    ) -> list[list[EncodedImage]]:
        pixels = torch.cat(kwargs["pixel_values"])
        signals, visual = self.encode_tiles(pixels, needs)
        layouts = [self.tile_layout(kwargs, i) for i in range(len(kwargs["pixel_values"]))]
        return [encoded_images(signals, visual, layouts, pixels, self.multi_modal_projector)]

    def kept_item(
        self, kwargs: Mapping[str, Any], modality: str, index: int, rows: torch.Tensor
    ) -> EncodedImage:
        layout = self.tile_layout(kwargs, index)
        return EncodedImage(Signals(), rows, layout, kwargs["pixel_values"][index])

"""Qwen2-VL: any resolution, four patches to a token, 3D positions, video.

What the vision models of the Qwen family share is here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen2_vl import (
    Qwen2VLForConditionalGeneration,
    Qwen2VLMultiModalProcessor,
)
from vllm.multimodal.inputs import MultiModalFeatureSpec

from msdg_vllm.engine.api.processor import with_processor
from msdg_vllm.engine.layout import TileLayout
from msdg_vllm.engine.worker.capture import capture_signals
from msdg_vllm.engine.worker.model import PruningModel
from msdg_vllm.engine.worker.positions import (
    MediaGrid,
    Medium,
    grid_positions,
    place_kept_tokens,
    prompt_positions,
    turn_on_position_hook,
    with_positions,
    without_positions,
)
from msdg_vllm.engine.worker.selection import EncodedImage
from msdg_vllm.methods import Needs, Signals
from msdg_vllm.models.qwen_processor import (
    GRID,
    PruningQwenVLProcessor,
    encoder_of,
    num_levels,
)

_PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


@dataclass(frozen=True, slots=True)
class _Patches:
    """What the encoder saw of one item, put together only when someone wants to see it."""

    patches: torch.Tensor
    start: int
    shape: tuple[int, int, int]
    merge_size: int

    def __getitem__(self, _: int) -> torch.Tensor:
        """`(3, H, W)`; the frames of a video one below the other."""
        merged = self.merge_size**2
        frames, rows, columns = self.shape
        count = frames * rows * columns
        patches = self.patches[self.start * merged : (self.start + count) * merged]
        # A patch holds two frames, in an image the same one twice.
        side = math.isqrt(patches.shape[-1] // (3 * 2))
        cells = patches.view(
            frames, rows, columns, self.merge_size, self.merge_size, 3, 2, side, side
        )
        pixels = cells[..., 0, :, :].permute(5, 0, 1, 3, 6, 2, 4, 7)
        return pixels.reshape(3, frames * rows * self.merge_size * side, -1)


def _frames(grids: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Where the patches of each frame start and stop: global attention spans one frame."""
    lengths = [height * width for frames, height, width in grids for _ in range(frames)]
    return list(pairwise(accumulate(lengths, initial=0)))


def _of_patches(tensor: torch.Tensor) -> torch.Tensor:
    """What the encoder computes, `(P, ..)`: it has a dimension of size 1 before or behind."""
    return tensor.squeeze(0 if tensor.shape[0] == 1 else 1)


class PruningQwenVL(PruningModel):
    """Mixin for Qwen's vision models: goes before the stock class in the bases."""

    supports_multimodal_pruning: ClassVar[Literal[True]] = True
    modalities: tuple[str, ...] = ("image", "video")
    encoder_of = staticmethod(encoder_of)
    visual: Any
    config: Any
    multimodal_config: Any
    iter_mm_grid_thw: Any

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        # Before the decoder is built: newer ones have RoPE tables for it only then.
        turn_on_position_hook(vllm_config.model_config.get_multimodal_config())
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # Where a model asks itself, it means the pruning of stock vLLM.
        self.is_multimodal_pruning_enabled = False
        self.embedding_width = vllm_config.model_config.get_inputs_embeds_size()
        self.row_width = self.embedding_width * (1 + num_levels(self.config))
        # Connectors of the encoder cache measure the width of rows once, for all items.
        self.has_one_width = vllm_config.ec_transfer_config is not None

    def encoder_blocks(self) -> Sequence[nn.Module]:
        return list(self.visual.blocks)

    def embed_multimodal(self, **kwargs: Any) -> Any:
        embeddings = super().embed_multimodal(**kwargs)
        if not self.has_one_width:
            return embeddings
        return [
            rows if rows.shape[-1] > self.row_width else without_positions(rows)
            for rows in embeddings
        ]

    def take_items(
        self, kwargs: Mapping[str, Any], modality: str, indices: Sequence[int]
    ) -> dict[str, Any]:
        grids = kwargs[GRID[modality]]
        pixels = kwargs[_PIXELS[modality]].split(grids.prod(-1).tolist())
        taken = {
            _PIXELS[modality]: torch.cat([pixels[index] for index in indices]),
            GRID[modality]: grids[list(indices)],
        }
        if modality == "video" and "second_per_grid_ts" in kwargs:
            taken["second_per_grid_ts"] = kwargs["second_per_grid_ts"][list(indices)]
        return taken

    def raster_order(self, metadata: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Where the tower has each token of the batch; None when it keeps their order."""
        return None

    def encode_items(
        self, kwargs: Mapping[str, Any], modality: str, needs: Needs
    ) -> list[list[EncodedImage]]:
        grids = kwargs[GRID[modality]].tolist()
        metadata = self.visual.prepare_encoder_metadata(grids)
        if needs.features:
            # The merger takes whole tokens, and what it takes is the last state.
            needs = needs | Needs(states=(self.encoder.num_layers,))
        order = self.raster_order(metadata)
        # The fused norm of some platforms writes to its input, so states that are held are copied.
        stream = self.token_stream(needs, order=self._patch_order(order), copies=True)
        with capture_signals(
            self.encoder_blocks(),
            needs,
            lambda block: block.attn,
            stream=stream,
            rows_of=lambda state: _of_patches(state).unsqueeze(0),
            spans=_frames(grids),
            copy=True,
        ) as captured:
            rows = self.visual(kwargs[_PIXELS[modality]], grid_thw=None, encoder_metadata=metadata)
        tokens = stream.finish() if stream else None
        images: list[EncodedImage] = []
        start = 0
        for index, shape in enumerate(map(self.merged, grids)):
            end = start + math.prod(shape)
            here = slice(start, end)
            signals = self._item_signals(captured, here if order is None else order[here], needs)
            if tokens is not None:
                signals = replace(
                    signals, token_signals=tokens.map(itemgetter((slice(None), here)))
                )
            image = self.kept_item(kwargs, modality, index, rows[None, start:end])
            images.append(replace(image, signals=signals))
            start = end
        return [images]

    def merged(self, grid: Sequence[int]) -> tuple[int, int, int]:
        """Frames, rows and columns of tokens of a grid of patches."""
        frames, height, width = grid
        merge_size = self.visual.spatial_merge_size
        return frames, height // merge_size, width // merge_size

    def kept_item(
        self, kwargs: Mapping[str, Any], modality: str, index: int, rows: torch.Tensor
    ) -> EncodedImage:
        *before, shape = map(self.merged, kwargs[GRID[modality]][: index + 1].tolist())
        start = sum(map(math.prod, before))
        merge_size = self.visual.spatial_merge_size
        return EncodedImage(
            signals=Signals(),
            visual=rows[..., : self.embedding_width],
            layout=TileLayout.of_one_tile((shape[1:],) * shape[0]),
            pixels=_Patches(kwargs[_PIXELS[modality]], start, shape, merge_size),
            finish=self.finisher(kwargs, modality, index, shape, rows[0]),
            rows=rows,
        )

    def _patch_order(self, order: torch.Tensor | None) -> torch.Tensor | None:
        """Where the tower has each patch, given where it has each token."""
        if order is None:
            return None
        patches = self.encoder.patches_per_token
        within = torch.arange(patches, device=order.device)
        return (order.unsqueeze(-1) * patches + within).flatten()

    def _item_signals(
        self, captured: Signals, places: slice | torch.Tensor, needs: Needs
    ) -> Signals:
        """What was captured about one item, in raster order of its tokens, `(1, P, ..)`."""
        patches = self.encoder.patches_per_token

        def taken(tensor: torch.Tensor) -> torch.Tensor:
            by_token = _of_patches(tensor).unflatten(0, (-1, patches))
            return by_token[places].flatten(0, 1).unsqueeze(0)

        signals = captured.map(taken)
        return replace(
            signals,
            features=signals.states[self.encoder.num_layers] if needs.features else None,
            received_attention={
                layer: total / total.shape[1] for layer, total in signals.received_attention.items()
            },
        )

    def finisher(
        self,
        kwargs: Mapping[str, Any],
        modality: str,
        index: int,
        shape: tuple[int, int, int],
        rows: torch.Tensor,
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """What makes the kept rows of an item of its kept tokens, given all it has, `(N, ..)`."""
        frame_step = 1.0
        if modality == "video" and "second_per_grid_ts" in kwargs:
            # Distance of frames on the time axis, as `iter_mm_grid_thw` has it.
            seconds = kwargs["second_per_grid_ts"][index].item()
            frame_step = seconds * self.config.vision_config.tokens_per_second
        return partial(with_positions, grid_positions(shape, frame_step, rows.device))

    def media(self, mm_features: list[MultiModalFeatureSpec]) -> Sequence[Medium]:
        """The images and videos of a prompt."""
        lengths = {
            feature.mm_position.offset: feature.mm_position.length for feature in mm_features
        }
        return [
            MediaGrid(offset, lengths[offset], (frames, rows, columns), frame_step)
            for offset, frames, rows, columns, frame_step in self.iter_mm_grid_thw(mm_features)
        ]

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[torch.Tensor, int]:
        media = self.media(mm_features)
        if any(item.is_pruned for item in media):
            return prompt_positions(len(input_tokens), media)
        stock: Any = super()
        unpruned: tuple[torch.Tensor, int] = stock.get_mrope_input_positions(
            input_tokens, mm_features
        )
        return unpruned

    def recompute_mrope_positions(
        self,
        input_ids: list[int] | torch.Tensor,
        multimodal_embeddings: Sequence[torch.Tensor],
        mrope_positions: torch.Tensor,
        num_computed_tokens: int,
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor, int]:
        return place_kept_tokens(
            mrope_positions,
            multimodal_embeddings,
            num_computed_tokens,
            self.row_width,
        )

    def get_model_state_cls(self) -> Any:
        """The state of vLLM's V2 runner for this model; V1 never asks."""
        from msdg_vllm.engine.worker.model_state import PruningModelState

        return PruningModelState


class PruningQwen2VLProcessor(PruningQwenVLProcessor, Qwen2VLMultiModalProcessor):
    """Qwen2-VL's processor with budgets."""


@with_processor(PruningQwen2VLProcessor)
class PruningQwen2VL(PruningQwenVL, Qwen2VLForConditionalGeneration):
    """Qwen2-VL that keeps the visual tokens its requests pay for."""

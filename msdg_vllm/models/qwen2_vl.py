"""Qwen2-VL: any resolution, four patches to a token, 3D positions, video.

What the vision models of the Qwen family share is here too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.qwen2_vl import (
    Qwen2VLDummyInputsBuilder,
    Qwen2VLForConditionalGeneration,
    Qwen2VLMultiModalProcessor,
    Qwen2VLProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.parse import VideoProcessorItems

from msdg_vllm.core.errors import RequestError, SettingsError
from msdg_vllm.core.profiles import EncoderProfile
from msdg_vllm.engine.api.processor import WITHOUT_PRUNING, PruningProcessor
from msdg_vllm.engine.layout import TileLayout
from msdg_vllm.engine.spec import PruningSpec, field_name
from msdg_vllm.engine.worker.capture import capture_signals
from msdg_vllm.engine.worker.model import PruningModel
from msdg_vllm.engine.worker.positions import (
    MediaGrid,
    grid_positions,
    place_kept_tokens,
    prompt_positions,
    turn_on_position_hook,
    with_positions,
)
from msdg_vllm.engine.worker.selection import EncodedImage
from msdg_vllm.methods import Encoder, Needs, Signals

# Below "vllm", because vLLM configures that logger and no other.
logger = init_logger(f"vllm.{__name__}")

_PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
_GRID = {"image": "image_grid_thw", "video": "video_grid_thw"}


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


def check_config(vllm_config: VllmConfig) -> None:
    """Raise `SettingsError` for options under which pruned answers would be wrong."""
    mm_config = vllm_config.model_config.get_multimodal_config()
    if mm_config.video_pruning_rate:
        raise SettingsError(
            f"--video-pruning-rate {mm_config.video_pruning_rate} and msdg-vllm would both prune "
            "videos; drop --video-pruning-rate and send `retention` with each request, or "
            f"{WITHOUT_PRUNING}"
        )
    if mm_config.mm_encoder_tp_mode == "data":
        raise SettingsError(
            "--mm-encoder-tp-mode data gives each rank a part of the images only, and the states "
            "that pruning reads are lost; use --mm-encoder-tp-mode weights, or "
            f"{WITHOUT_PRUNING}"
        )
    if (num_stages := vllm_config.parallel_config.pipeline_parallel_size) > 1:
        raise SettingsError(
            f"--pipeline-parallel-size {num_stages} cannot prune Qwen models: positions of kept "
            "tokens are known to the first stage only; use --tensor-parallel-size, or "
            f"{WITHOUT_PRUNING}"
        )
    if vllm_config.compilation_config.compile_mm_encoder:
        raise SettingsError(
            "compile_mm_encoder hides the encoder's states, which pruning reads; set "
            f"compile_mm_encoder to false, or {WITHOUT_PRUNING}"
        )


def encoder_of(hf_config: Any, profile: EncoderProfile) -> Encoder:
    """The encoder of a checkpoint: no class token, and of Qwen2.5 most layers see windows only."""
    vision_config = hf_config.vision_config
    global_layers = getattr(vision_config, "fullatt_block_indexes", None)
    return Encoder(
        num_layers=vision_config.depth,
        profile=profile,
        has_class_token=False,
        global_layers=None if global_layers is None else tuple(global_layers),
        patches_per_token=vision_config.spatial_merge_size**2,
    )


class PruningQwenVLProcessor(PruningProcessor):
    """Mixin for the processors of Qwen's vision models: a budget per image and per video."""

    modalities = ("image", "video")
    encoder_of = staticmethod(encoder_of)

    def check_config(self, vllm_config: VllmConfig) -> None:
        super().check_config(vllm_config)
        check_config(vllm_config)

    def num_visual_tokens(
        self, items: Any, modality: str, index: int, kwargs: Mapping[str, object]
    ) -> int:
        hf_processor = self.info.get_hf_processor(**kwargs)
        if modality == "image":
            size = items.get_image_size(index)
            num_tokens = self.info.get_num_image_tokens(
                image_width=size.width,
                image_height=size.height,
                image_processor=hf_processor.image_processor,
                mm_kwargs=kwargs,
            )
        else:
            frames = items.get(index)
            # Models that place frames in time get them with metadata.
            video = VideoProcessorItems([frames[0] if isinstance(frames, tuple) else frames])
            size = video.get_frame_size(0)
            num_tokens = self.info.get_num_video_tokens(
                image_width=size.width,
                image_height=size.height,
                num_frames=video.get_num_frames(0),
                # Only sizes are read of it, and those of videos are the video processor's.
                image_processor=hf_processor.video_processor,
                mm_kwargs=kwargs,
            )
        return int(num_tokens)

    def _postprocess_hf_mm_data(
        self, mm_inputs: Any, hf_processor_mm_kwargs: Mapping[str, object], processed_data: Any
    ) -> Any:
        processed = super()._postprocess_hf_mm_data(
            mm_inputs, hf_processor_mm_kwargs, processed_data
        )
        merge_unit = self.info.get_hf_config().vision_config.spatial_merge_size ** 2
        for modality in self.modalities:
            for index, row in enumerate(processed.get(field_name(modality), ())):
                spec = PruningSpec.from_tensor(row)
                num_tokens = int(processed[_GRID[modality]][index].prod()) // merge_unit
                if spec.budget and spec.num_tokens != num_tokens:
                    # Some processor kwargs (frame sampling, no resizing) change the geometry.
                    raise RequestError(
                        f"retention cannot be applied: {modality} {index} has {num_tokens} tokens "
                        f"with these mm_processor_kwargs, {spec.num_tokens} by its size; leave "
                        "out the kwargs that change it, or send retention 1.0",
                        parameter="retention",
                    )
        return processed

    def placeholder_ids(self) -> Mapping[int, str]:
        config = self.info.get_hf_config()
        return {config.image_token_id: "image", config.video_token_id: "video"}


class PruningQwenVL(PruningModel):
    """Mixin for Qwen's vision models: goes before the stock class in the bases."""

    supports_multimodal_pruning: ClassVar[Literal[True]] = True
    modalities = ("image", "video")
    encoder_of = staticmethod(encoder_of)
    visual: Any
    config: Any
    multimodal_config: Any
    iter_mm_grid_thw: Any

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        check_config(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.embedding_width = vllm_config.model_config.get_inputs_embeds_size()
        turn_on_position_hook(self.multimodal_config)
        logger.info_once("Encoder CUDA graphs stay off: they would hide the states to prune by")

    def encoder_blocks(self) -> Sequence[nn.Module]:
        return list(self.visual.blocks)

    def take_items(
        self, kwargs: Mapping[str, Any], modality: str, indices: Sequence[int]
    ) -> dict[str, Any]:
        grids = kwargs[_GRID[modality]]
        pixels = kwargs[_PIXELS[modality]].split(grids.prod(-1).tolist())
        taken = {
            _PIXELS[modality]: torch.cat([pixels[index] for index in indices]),
            _GRID[modality]: grids[list(indices)],
        }
        if modality == "video" and "second_per_grid_ts" in kwargs:
            taken["second_per_grid_ts"] = kwargs["second_per_grid_ts"][list(indices)]
        return taken

    def raster_order(self, metadata: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Where the tower has each token of the batch; None when it keeps their order."""
        return None

    def encode_items(
        self, kwargs: Mapping[str, Any], modality: str, needs: Needs
    ) -> Iterator[list[EncodedImage]]:
        grids = kwargs[_GRID[modality]].tolist()
        metadata = self.visual.prepare_encoder_metadata(grids)
        if needs.features:
            # The merger takes whole tokens, and what it takes is the last state.
            needs = needs | Needs(states=(self.encoder.num_layers,))
        with capture_signals(
            self.encoder_blocks(),
            needs,
            lambda block: block.attn,
            spans=_frames(grids),
            # The fused norm of some platforms writes to its input, so states are copied.
            copy=True,
        ) as captured:
            visual = self.visual(
                kwargs[_PIXELS[modality]], grid_thw=None, encoder_metadata=metadata
            )
        order = self.raster_order(metadata)
        frame_steps = self._frame_steps(kwargs, modality, len(grids))
        start = 0
        for (frames, height, width), frame_step in zip(grids, frame_steps, strict=True):
            merge_size = self.visual.spatial_merge_size
            shape = (frames, height // merge_size, width // merge_size)
            end = start + shape[0] * shape[1] * shape[2]
            places = slice(start, end) if order is None else order[start:end]
            yield [
                EncodedImage(
                    signals=self._item_signals(captured, places, needs),
                    visual=visual[start:end].unsqueeze(0),
                    layout=TileLayout.of_one_tile((shape[1:],) * frames),
                    pixels=_Patches(kwargs[_PIXELS[modality]], start, shape, merge_size),
                    finish=partial(
                        with_positions, grid_positions(shape, frame_step, visual.device)
                    ),
                )
            ]
            start = end

    def _item_signals(
        self, captured: Signals, places: slice | torch.Tensor, needs: Needs
    ) -> Signals:
        """What was captured about one item, in raster order of its tokens, `(1, P, ..)`."""
        patches = self.encoder.patches_per_token

        def taken(tensor: torch.Tensor) -> torch.Tensor:
            # The encoder has a dimension of size 1 before or behind that of the patches.
            by_token = tensor.squeeze(0 if tensor.shape[0] == 1 else 1).unflatten(0, (-1, patches))
            return by_token[places].flatten(0, 1).unsqueeze(0)

        signals = captured.map(taken)
        return replace(
            signals,
            features=signals.states[self.encoder.num_layers] if needs.features else None,
            received_attention={
                layer: total / total.shape[1] for layer, total in signals.received_attention.items()
            },
        )

    def _frame_steps(self, kwargs: Mapping[str, Any], modality: str, count: int) -> list[float]:
        """Distance of frames on the time axis, as `iter_mm_grid_thw` has it."""
        if modality == "image" or "second_per_grid_ts" not in kwargs:
            return [1.0] * count
        tokens_per_second = self.config.vision_config.tokens_per_second
        return [seconds * tokens_per_second for seconds in kwargs["second_per_grid_ts"].tolist()]

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[torch.Tensor, int]:
        lengths = {
            feature.mm_position.offset: feature.mm_position.length for feature in mm_features
        }
        media = [
            MediaGrid(offset, lengths[offset], (frames, rows, columns), frame_step)
            for offset, frames, rows, columns, frame_step in self.iter_mm_grid_thw(mm_features)
        ]
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
            self.embedding_width,
        )

    def get_encoder_cudagraph_config(self) -> Any:
        stock: Any = super()
        return replace(stock.get_encoder_cudagraph_config(), modalities=[])


class PruningQwen2VLProcessor(PruningQwenVLProcessor, Qwen2VLMultiModalProcessor):
    """Qwen2-VL's processor with budgets."""


@MULTIMODAL_REGISTRY.register_processor(
    PruningQwen2VLProcessor,
    info=Qwen2VLProcessingInfo,
    dummy_inputs=Qwen2VLDummyInputsBuilder,
)
class PruningQwen2VL(PruningQwenVL, Qwen2VLForConditionalGeneration):
    """Qwen2-VL that keeps the visual tokens its requests pay for."""

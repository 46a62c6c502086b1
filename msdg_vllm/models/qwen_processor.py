"""The processor's half of Qwen's vision models: a budget for every image and every video."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from PIL import Image
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems, VideoProcessorItems

from msdg_vllm.core.errors import RequestError
from msdg_vllm.core.profiles import EncoderProfile
from msdg_vllm.engine.api.position_limit import Span, check_positions, table_size
from msdg_vllm.engine.api.processor import SPECS, PruningProcessor
from msdg_vllm.engine.api.specs import Scaled, Specs
from msdg_vllm.engine.spec import PruningSpec
from msdg_vllm.engine.worker.positions import MediaGrid
from msdg_vllm.methods import Encoder, method_named
from msdg_vllm.methods.resize import scaled_grid

GRID = {"image": "image_grid_thw", "video": "video_grid_thw"}
"""Fields with frames, rows and columns of an item's patches."""


def encoder_of(hf_config: Any, profile: EncoderProfile | None) -> Encoder:
    """The encoder of a checkpoint: no class token, and of Qwen2.5 most layers see windows only."""
    vision_config = hf_config.vision_config
    global_layers = getattr(vision_config, "fullatt_block_indexes", None)
    return Encoder(
        num_layers=vision_config.depth,
        profile=profile,
        has_class_token=False,
        global_layers=None if global_layers is None else tuple(global_layers),
        patches_per_token=vision_config.spatial_merge_size**2,
        num_levels=num_levels(hf_config),
        free_resolution=True,
    )


def num_levels(hf_config: Any) -> int:
    """Further embeddings behind that of each token, which Qwen3-VL has for DeepStack."""
    return len(getattr(hf_config.vision_config, "deepstack_visual_indexes", None) or ())


class PruningQwenVLProcessor(PruningProcessor):
    """Mixin for the processors of Qwen's vision models: a budget per image and per video."""

    modalities: tuple[str, ...] = ("image", "video")
    encoder_of = staticmethod(encoder_of)

    def num_visual_tokens(
        self, items: Any, modality: str, index: int, kwargs: Mapping[str, object]
    ) -> int:
        frames, rows, columns = self.grid(items, modality, index, kwargs)
        return frames * rows * columns

    def grid(
        self, items: Any, modality: str, index: int, kwargs: Mapping[str, object]
    ) -> tuple[int, int, int]:
        """Frames, rows and columns of the tokens of an item."""
        hf_processor = self.info.get_hf_processor(**kwargs)
        if modality == "image":
            size, num_frames = items.get_image_size(index), 1
            sizes = hf_processor.image_processor
        else:
            frames = items.get(index)
            # Models that place frames in time get them with metadata.
            video = VideoProcessorItems([frames[0] if isinstance(frames, tuple) else frames])
            size, num_frames = video.get_frame_size(0), video.get_num_frames(0)
            sizes = hf_processor.video_processor
        resized, num_tokens = self.info._get_vision_info(
            image_width=size.width,
            image_height=size.height,
            num_frames=num_frames,
            image_processor=sizes,
            mm_kwargs=kwargs,
            modality=modality,
        )
        _, rows, columns = self.merged(1, resized)
        return num_tokens // (rows * columns), rows, columns

    def merged(self, frames: int, resized: Any) -> tuple[int, int, int]:
        """Frames, rows and columns of the tokens of frames of a size."""
        side = self._token_side
        return frames, resized.height // side, resized.width // side

    def pixels_of(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Width and height of an image that has a grid of tokens, rows before columns."""
        rows, columns = grid
        return columns * self._token_side, rows * self._token_side

    @property
    def _token_side(self) -> int:
        """Pixels along the side of a token."""
        vision_config = self.info.get_hf_config().vision_config
        return int(vision_config.patch_size * vision_config.spatial_merge_size)

    def scaled(self, items: Any, specs: Specs, kwargs: dict[str, object]) -> Scaled:
        """Return items, specs and kwargs with images at the size that their method wants.

        A scaled image is another content: hashes, caches and geometry see nothing of the original
        but its number of tokens. The kwargs then allow images smaller than the model's
        preprocessing otherwise makes them.
        """
        grids = {
            (modality, index): self._scaled_grid(items[modality], modality, index, kwargs, spec)
            for modality, own in specs.items()
            for index, spec in enumerate(own)
        }
        if not any(grids.values()):
            return items, specs, dict(kwargs)
        images = items["image"]
        smaller = [images.get_item_for_hash(index) for index in range(images.get_count())]
        scaled = list(specs["image"])
        for index, spec in enumerate(scaled):
            if grid := grids["image", index]:
                smaller[index] = _resized(images.get(index), index, self.pixels_of(grid))
                num_tokens = grid[0] * grid[1]
                scaled[index] = replace(
                    spec,
                    budget=min(spec.budget, num_tokens),
                    num_tokens=num_tokens,
                    scaled_from=spec.num_tokens,
                )
        made = ImageProcessorItems(smaller)
        any_size = self.without_smallest_size(kwargs)
        for index, spec in enumerate(scaled):
            wanted = spec.num_tokens or self.num_visual_tokens(images, "image", index, kwargs)
            num_tokens = self.num_visual_tokens(made, "image", index, any_size)
            if num_tokens != wanted:
                raise RequestError(
                    f"image {index} would have {num_tokens} instead of {wanted} tokens beside "
                    "images that are scaled down; send another retention or another method",
                    parameter="pruning.method",
                )
        return MultiModalDataItems({**items, "image": made}), {**specs, "image": scaled}, any_size

    def _scaled_grid(
        self,
        items: Any,
        modality: str,
        index: int,
        kwargs: Mapping[str, object],
        spec: PruningSpec,
    ) -> tuple[int, int] | None:
        """Rows and columns that an item is to have; None to leave it."""
        if not spec.budget:
            return None
        most = method_named(spec.method).encoder_tokens(spec.num_tokens, spec.budget)
        if most >= spec.num_tokens:
            return None
        if modality != "image":
            raise RequestError(
                f"method {spec.method!r} scales images and no {modality}s; send the {modality} "
                "with another method",
                parameter="pruning.method",
            )
        _, rows, columns = self.grid(items, modality, index, kwargs)
        return scaled_grid(rows, columns, most)

    def without_smallest_size(self, kwargs: Mapping[str, object]) -> dict[str, object]:
        """Kwargs with which preprocessing leaves small images as they are."""
        asked: Any = kwargs.get("images_kwargs", {})
        size = self.info.get_hf_processor(**kwargs).image_processor.size
        smallest = {"shortest_edge": 1, "longest_edge": size["longest_edge"]}
        return {**kwargs, "images_kwargs": {**asked, "size": {**smallest, **asked.get("size", {})}}}

    def check_prompt(self, processed: Any, items: Any, kwargs: Mapping[str, object]) -> None:
        specs: Specs = processed[SPECS]
        spans = []
        for modality, modality_specs in specs.items():
            places = processed["mm_placeholders"][modality]
            for index, (spec, place) in enumerate(zip(modality_specs, places, strict=True)):
                extent = place.length  # nothing takes up more positions than it has tokens
                if spec.budget:
                    num_texts = place.length - spec.budget
                    extent = self.extent(items[modality], modality, index, kwargs, num_texts)
                spans.append(Span(place.offset, place.length, extent))
        model_config = self.info.ctx.model_config
        check_positions(spans, model_config.max_model_len, table_size(model_config.hf_text_config))

    def extent(
        self,
        items: Any,
        modality: str,
        index: int,
        kwargs: Mapping[str, object],
        num_texts: int,
    ) -> int:
        """Positions that an item takes up, with the tokens of text that it has in the prompt."""
        return MediaGrid(
            0, 0, self.grid(items, modality, index, kwargs), self.frame_step(items, modality, index)
        ).extent

    def frame_step(self, items: Any, modality: str, index: int) -> float:
        """Distance of frames on the time axis."""
        return 1.0

    def check_geometry(self, processed: Any, specs: Specs) -> None:
        merge_unit = self.info.get_hf_config().vision_config.spatial_merge_size ** 2
        for modality, modality_specs in specs.items():
            for index, spec in enumerate(modality_specs):
                if not spec.budget:
                    continue
                num_tokens = int(processed[GRID[modality]][index].prod()) // merge_unit
                if spec.num_tokens != num_tokens:
                    # Some processor kwargs (frame sampling, no resizing) change the geometry.
                    raise RequestError(
                        f"retention cannot be applied: {modality} {index} has {num_tokens} tokens "
                        f"with these mm_processor_kwargs, {spec.num_tokens} by its size; leave "
                        "out the kwargs that change it, or send retention 1.0",
                        parameter="retention",
                    )

    def placeholder_ids(self) -> Mapping[int, str]:
        config = self.info.get_hf_config()
        return {config.image_token_id: "image", config.video_token_id: "video"}


def _resized(image: Any, index: int, size: tuple[int, int]) -> Image.Image:
    """An image at another size, width before height."""
    if not isinstance(image, Image.Image):
        raise RequestError(
            f"image {index} came as an array of pixels, which is not scaled; send a file, or "
            "choose another method",
            parameter="pruning.method",
        )
    return image.convert("RGB").resize(size, Image.Resampling.BICUBIC)

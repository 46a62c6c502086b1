"""Images that are scaled down before the encoder, for methods that ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from PIL import Image
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems

from msdg_vllm.core.errors import RequestError
from msdg_vllm.engine.api.specs import Scaled, Specs
from msdg_vllm.engine.spec import PruningSpec
from msdg_vllm.methods import method_named
from msdg_vllm.methods.resize import scaled_grid


class Sizes(Protocol):
    """What a processor of images of any size knows of them."""

    def grid(
        self, items: Any, modality: str, index: int, kwargs: Mapping[str, object]
    ) -> tuple[int, int, int]:
        """Frames, rows and columns of the tokens of an item."""
        ...

    def num_visual_tokens(
        self, items: Any, modality: str, index: int, kwargs: Mapping[str, object]
    ) -> int:
        """Tokens of an item."""
        ...

    def pixels_of(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Width and height of an image that has a grid of tokens."""
        ...

    def without_smallest_size(self, kwargs: Mapping[str, object]) -> dict[str, object]:
        """Kwargs with which preprocessing leaves small images as they are."""
        ...


def scale_items(processor: Sizes, items: Any, specs: Specs, kwargs: dict[str, object]) -> Scaled:
    """Return items, specs and kwargs of a prompt with images at the size that their method wants.

    A scaled image is another content: hashes, caches and geometry see nothing of the original but
    its number of tokens. The kwargs then allow images smaller than the model's preprocessing
    otherwise makes them.
    """
    grids = {
        (modality, index): _scaled_grid(processor, items[modality], modality, index, kwargs, spec)
        for modality, modality_specs in specs.items()
        for index, spec in enumerate(modality_specs)
    }
    if not any(grids.values()):
        return items, specs, kwargs
    images = items["image"]
    smaller = [images.get_item_for_hash(index) for index in range(images.get_count())]
    scaled = list(specs["image"])
    for index, spec in enumerate(scaled):
        if grid := grids["image", index]:
            smaller[index] = _resized(images.get(index), index, processor.pixels_of(grid))
            num_tokens = grid[0] * grid[1]
            scaled[index] = replace(
                spec,
                budget=min(spec.budget, num_tokens),
                num_tokens=num_tokens,
                scaled_from=spec.num_tokens,
            )
    made = ImageProcessorItems(smaller)
    any_size = processor.without_smallest_size(kwargs)
    for index, spec in enumerate(scaled):
        wanted = spec.num_tokens or processor.num_visual_tokens(images, "image", index, kwargs)
        num_tokens = processor.num_visual_tokens(made, "image", index, any_size)
        if num_tokens != wanted:
            raise RequestError(
                f"image {index} would have {num_tokens} instead of {wanted} tokens beside images "
                "that are scaled down; send another retention or another method",
                parameter="pruning.method",
            )
    return MultiModalDataItems({**items, "image": made}), {**specs, "image": scaled}, any_size


def _scaled_grid(
    processor: Sizes,
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
    _, rows, columns = processor.grid(items, modality, index, kwargs)
    return scaled_grid(rows, columns, most)


def _resized(image: Any, index: int, size: tuple[int, int]) -> Image.Image:
    """An image at another size, width before height."""
    if not isinstance(image, Image.Image):
        raise RequestError(
            f"image {index} came as an array of pixels, which is not scaled; send a picture, or "
            "choose another method",
            parameter="pruning.method",
        )
    return image.convert("RGB").resize(size, Image.Resampling.BICUBIC)

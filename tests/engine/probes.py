"""Functions that tests send into the worker to watch it at work."""

from __future__ import annotations

from typing import Any


def watch_tower(model: Any) -> None:
    """Count the images of every call of the vision tower from now on."""
    model.tower_batches = []
    if getattr(model.vision_tower, "is_watched", False):
        return
    model.vision_tower.is_watched = True
    forward = model.vision_tower.forward

    def counted(pixel_values: Any, *args: Any, **kwargs: Any) -> Any:
        model.tower_batches.append(len(pixel_values))
        return forward(pixel_values, *args, **kwargs)

    model.vision_tower.forward = counted


def tower_batches(model: Any) -> list[int]:
    """How many images each call of the tower got since it is watched."""
    return list(model.tower_batches)


def kept_tokens(model: Any, key: int) -> list[int]:
    """Which tokens were kept of the only image of an explained request."""
    (tile,) = model.explanations.get(key)
    kept: list[int] = tile["kept"]
    return kept


def encoder_images(model: Any) -> int:
    """How many images the encoder has run on to have them pruned."""
    images: int = model.statistics.encoder_images
    return images


def store_counts(model: Any) -> dict[str, int]:
    """What the image store counted."""
    counts: dict[str, int] = model.store.snapshot()
    return counts


def resize_store(model: Any, max_bytes: int) -> None:
    """Start again with a store of another size."""
    from msdg_vllm.engine.worker.image_store import ImageStore

    model.store = ImageStore(max_bytes, model.encoder)


def explained(model: Any, key: int) -> list[dict[str, Any]]:
    """What was decided for an explained request, tile by tile."""
    tiles: list[dict[str, Any]] = model.explanations.get(key, with_pictures=True)
    return tiles

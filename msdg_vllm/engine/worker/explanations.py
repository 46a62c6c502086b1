"""What a worker remembers of explained requests: a bounded store, read by a remote call.

Workers keep it, because they decide, and because every API server process can ask them. Nothing
here waits for the device before someone asks.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

MAX_REQUESTS = 256
MAX_BYTES = 64 * 2**20
LIFETIME_SECONDS = 600.0

_MAX_PICTURE_SIDE = 448


@dataclass(frozen=True, slots=True)
class TileExplanation:
    """What was decided about one grid of tokens: an image, or one tile of it.

    Attributes:
        item: Which image of the request, counted from 0.
        tile: Which tile of the image, counted from 0.
        grid: Rows and columns of the tokens; token `i` is at row `i // columns`.
        kept: Indices of the kept tokens, `(B,)`, ascending; or a mask of them, `(N,)`.
        groups: Group of each token, `(N,)`, -1 for none; None for a method without groups.
        sinks: `(N,)`, True for sinks; None for a method without a sink filter.
        scores: Score of each token, `(N,)`; None for a method that does not score.
        picture: What the encoder saw, `(H, W, 3)` uint8; None if it cannot be shown.
        frames: Frames of a video, which stand below each other in the grid; 1 for an image.
        encoded: Whether the encoder ran for it; otherwise the image was known.
    """

    item: int
    tile: int
    grid: tuple[int, int]
    kept: torch.Tensor
    groups: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    picture: torch.Tensor | None = None
    frames: int = 1
    encoded: bool = True

    def to_host(self) -> TileExplanation:
        """Start copying the tensors to the host; the copies must not be read before a sync."""
        return replace(
            self,
            **{
                name: tensor.to("cpu", non_blocking=True)
                for name, tensor in self._tensors().items()
            },
        )

    @property
    def num_bytes(self) -> int:
        """Memory of the tensors."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def to_dict(self, *, with_picture: bool) -> dict[str, Any]:
        """Return plain values that can cross processes."""
        rows, columns = self.grid
        kept = self.kept.nonzero().flatten() if self.kept.dtype == torch.bool else self.kept
        data: dict[str, Any] = {
            "index": self.item,
            "tile": self.tile,
            "grid": [rows, columns],
            "frames": self.frames,
            "encoded": self.encoded,
            "num_tokens": rows * columns,
            "kept": kept.tolist(),
            "groups": None if self.groups is None else self.groups[kept].tolist(),
            "all_groups": None if self.groups is None else self.groups.tolist(),
            "sinks": None if self.sinks is None else self.sinks.nonzero().flatten().tolist(),
            # JSON knows neither infinity nor NaN.
            "scores": None if self.scores is None else self.scores.float().nan_to_num().tolist(),
        }
        if with_picture and self.picture is not None:
            height, width, _ = self.picture.shape
            data["picture"] = {
                "height": height,
                "width": width,
                "pixels": self.picture.numpy().tobytes(),
            }
        return data

    def _tensors(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def picture_of(
    pixels: torch.Tensor, mean: Sequence[float] | None, std: Sequence[float] | None
) -> torch.Tensor:
    """Turn an encoder's input `(3, H, W)` back into a small picture `(h, w, 3)` of uint8.

    Args:
        pixels: Raw uint8, or normalised by `mean` and `std`.
        mean: What was taken off each channel; None stands for 0.
        std: What each channel was divided by; None stands for 1.
    """
    step = -(-max(pixels.shape[-2:]) // _MAX_PICTURE_SIDE)
    pixels = pixels[:, ::step, ::step]
    if pixels.is_floating_point():
        # Channel by channel with Python numbers: a tensor of them would have to be copied over.
        channels = [
            channel.float() * (std[c] if std else 1.0) + (mean[c] if mean else 0.0)
            for c, channel in enumerate(pixels)
        ]
        pixels = torch.stack(channels).mul(255).round().clamp(0, 255).to(torch.uint8)
    return pixels.permute(1, 2, 0).contiguous()


class ExplanationStore:
    """Explanations by request, bounded in number, in bytes and in time; the oldest go first."""

    def __init__(
        self,
        *,
        max_requests: int = MAX_REQUESTS,
        max_bytes: int = MAX_BYTES,
        lifetime: float = LIFETIME_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.lifetime = lifetime
        self._clock = clock
        self._num_bytes = 0
        # Images of one request may be encoded in different steps, and again after an eviction.
        self._tiles: OrderedDict[int, dict[tuple[int, int], TileExplanation]] = OrderedDict()
        self._born: dict[int, float] = {}

    def keep(self, key: int, tile: TileExplanation) -> None:
        """Add a tile to the explanation of the request `key`."""
        self.drop_expired()
        tile = tile.to_host()
        if tile.num_bytes > self.max_bytes:
            return
        tiles = self._tiles.setdefault(key, {})
        self._born.setdefault(key, self._clock())
        replaced = tiles.get((tile.item, tile.tile))
        tiles[tile.item, tile.tile] = tile
        self._num_bytes += tile.num_bytes - (replaced.num_bytes if replaced else 0)
        while len(self._tiles) > self.max_requests or self._num_bytes > self.max_bytes:
            self._drop(next(iter(self._tiles)))

    def get(self, key: int, *, with_pictures: bool = False) -> list[dict[str, Any]] | None:
        """Return the tiles of a request in order, or None when it is unknown or expired."""
        self.drop_expired()
        tiles = self._tiles.get(key)
        if tiles is None:
            return None
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return [tiles[place].to_dict(with_picture=with_pictures) for place in sorted(tiles)]

    def __len__(self) -> int:
        return len(self._tiles)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self._num_bytes

    def drop_expired(self) -> None:
        """Forget what is older than its lifetime."""
        limit = self._clock() - self.lifetime
        while self._tiles and self._born[key := next(iter(self._tiles))] < limit:
            self._drop(key)

    def _drop(self, key: int) -> None:
        del self._born[key]
        self._num_bytes -= sum(tile.num_bytes for tile in self._tiles.pop(key).values())

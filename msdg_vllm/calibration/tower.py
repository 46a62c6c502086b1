"""A vision tower as calibration sees it: images in, the states of their patches out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

Masks = NDArray[np.bool_]
Areas = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TowerInfo:
    """What is known of a tower before it runs.

    Attributes:
        name: The model, as it was asked for.
        revision: Its revision; None for a folder.
        digest: SHA-256 over the tower's weights.
        model_type: The kind of encoder, such as `clip_vision_model`.
        num_layers: Blocks that run; state `num_layers` goes to the projector.
        depth: Blocks that the checkpoint has; the paper's L.
        width: d, the width of a state.
        patches_per_token: How many neighbouring patches merge into one visual token.
        global_layers: Layers whose attention spans the image; None means all.
    """

    name: str
    revision: str | None
    digest: str
    model_type: str
    num_layers: int
    depth: int
    width: int
    patches_per_token: int = 1
    global_layers: tuple[int, ...] | None = None

    @property
    def direction_end(self) -> int:
        """The paper's late state of directions, L - 1, or the last one there is."""
        return min(self.depth - 1, self.num_layers)


@dataclass(frozen=True, slots=True)
class Encoded:
    """One image after the tower.

    Attributes:
        states: The state that enters each layer, and the last one's output, `(P, d)` each, in
            raster order of tokens: no class token, no registers, windows undone.
        grid: Rows and columns of tokens.
        valid: `(N,)` bool on the host, False for padding.
    """

    states: Sequence[Tensor]
    grid: tuple[int, int]
    valid: NDArray[np.bool_]


class Tower(Protocol):
    """What calibration needs of a vision encoder; `loading` builds one from a checkpoint."""

    info: TowerInfo

    def encode(self, image: Image.Image) -> Encoded:
        """Run the tower on one image, prepared as the server prepares it."""
        ...

    def areas(self, masks: Masks) -> Areas:
        """Return the share of each token that masks cover, `(I, N)` from `(I, height, width)`.

        Masks take the way of the image: they are resized, cropped and padded with it.
        """
        ...

    def view(self, image: Image.Image) -> Image.Image:
        """Return what the tower sees of an image; the token grid divides it evenly."""
        ...

"""The high-resolution tower: ConvNeXt up to its four feature maps, with timm's parameter names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

_EPSILON = 1e-6


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of `(B, C, H, W)`."""

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        normed = super().forward(maps.permute(0, 2, 3, 1))
        return normed.permute(0, 3, 1, 2)


class Mlp(nn.Module):
    """Two linear layers with an exact GELU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.fc2(functional.gelu(self.fc1(features)))
        return output


class Block(nn.Module):
    """Depthwise 7x7 convolution, then an MLP over channels, scaled and added to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(width, width, kernel_size=7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=_EPSILON)
        self.mlp = Mlp(width)
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        update = self.conv_dw(maps).permute(0, 2, 3, 1)
        update = self.mlp(self.norm(update)) * self.gamma
        return maps + update.permute(0, 3, 1, 2)


class Stage(nn.Module):
    """Blocks of one resolution, behind a halving of the resolution in all stages but the first."""

    def __init__(self, width_before: int, width: int, depth: int, *, halve: bool) -> None:
        super().__init__()
        self.downsample = (
            nn.Sequential(
                ChannelNorm(width_before, eps=_EPSILON),
                nn.Conv2d(width_before, width, kernel_size=2, stride=2),
            )
            if halve
            else nn.Identity()
        )
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.blocks(self.downsample(maps))
        return output


class ConvNextTower(nn.Module):
    """Pixels to one map of all four stages, at the resolution of the first."""

    def __init__(self, depths: Sequence[int], widths: Sequence[int]) -> None:
        super().__init__()
        self.vision_stem = nn.Sequential(
            nn.Conv2d(3, widths[0], kernel_size=4, stride=4),
            ChannelNorm(widths[0], eps=_EPSILON),
        )
        self.vision_stages = nn.ModuleList(
            Stage(widths[max(i - 1, 0)], widths[i], depths[i], halve=i > 0)
            for i in range(len(depths))
        )

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return `(B, sum of widths, H / 4, W / 4)`; the maps are raw, without a final norm."""
        maps = self.vision_stem(pixels)
        outputs = []
        for stage in self.vision_stages:
            maps = stage(maps)
            outputs.append(maps)
        size = outputs[0].shape[-2:]
        return torch.cat([outputs[0], *(resize(maps, size) for maps in outputs[1:])], dim=1)


def resize(maps: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Bilinear without antialiasing, in float32 whatever comes in."""
    resized = functional.interpolate(maps.float(), size=tuple(size), mode="bilinear")
    return resized.to(maps.dtype)

"""Loading: the vision tower of a checkpoint, alone, run as the server runs it.

Hugging Face's tower and image processor. The server's tower is vLLM's, built from the same weights;
a test holds the states of both against each other.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from transformers import AutoConfig, AutoImageProcessor, AutoModel
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.vision_utils import get_vision_window_index

from msdg_vllm.calibration.tower import Areas, Encoded, Masks, TowerInfo
from msdg_vllm.calibration.weights import digest, load_weights
from msdg_vllm.core.errors import CalibrationError

_HALF = 0.5


def load_tower(model: str, device: str = "cpu") -> "HuggingFaceTower":
    """Return the vision tower of a model folder, or of a model on the hub.

    Only the files that hold the tower's weights are read. A checkpoint of nothing but a vision
    encoder will do too.

    Raises:
        CalibrationError: If there is no tower, or none that profiles can describe.
    """
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        processor = AutoImageProcessor.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise CalibrationError(
                f"{model} brings code of its own, which is not run; calibrate the same model in "
                "Hugging Face's format (of InternVL its name ends in -hf): the encoder is the same"
            ) from error
        reason = str(error).splitlines()[0]
        raise CalibrationError(f"{model} is no vision-language model: {reason}") from error
    vision_config = getattr(config, "vision_config", config)
    if getattr(vision_config, "patch_size", None) is None:
        raise CalibrationError(
            f"{model} ({config.model_type}) has no vision encoder of patches to calibrate"
        )
    _stated_depth(vision_config)
    tower: nn.Module = (
        Qwen2VisionTransformerPretrainedModel(vision_config)
        if isinstance(vision_config, Qwen2VLVisionConfig)  # which AutoModel does not know
        else AutoModel.from_config(vision_config)
    )
    load_weights(tower, model)
    # The server keeps the checkpoint's type on a GPU; on a CPU float32 loses nothing.
    dtype = torch.float32 if device == "cpu" else getattr(config, "dtype", None)
    return HuggingFaceTower(model, config, tower.to(device, dtype).eval(), processor)


class HuggingFaceTower:
    """A tower of Hugging Face transformers.

    Pictures of one size, whose patches may merge afterwards as InternVL's do, or patches as rows
    that stand together where they merge, as Qwen's and GLM's do.
    """

    def __init__(self, name: str, config: Any, tower: nn.Module, processor: Any) -> None:
        vision_config = getattr(config, "vision_config", config)
        self._tower: Any = tower
        self._processor = processor
        patch = vision_config.patch_size
        self._patch = int(patch if isinstance(patch, int) else patch[0])
        self._blocks = _blocks_of(tower)
        self._merge = _patches_merged(config)
        # InternVL puts the tile that shows the whole image behind the others, LLaVA-NeXT before.
        self._whole = -1 if hasattr(config, "downsample_ratio") else 0
        depth = len(self._blocks)
        stated = _stated_depth(vision_config)
        if depth != stated:
            raise CalibrationError(
                f"{name}: the tower has {depth} blocks, its configuration says {stated}; "
                "the checkpoint does not fit its configuration"
            )
        windowed = getattr(vision_config, "fullatt_block_indexes", None)
        self.info = TowerInfo(
            name=name,
            revision=getattr(config, "_commit_hash", None),
            digest=digest(tower),
            model_type=vision_config.model_type,
            num_layers=_layers_run(name, config, depth),
            depth=depth,
            # Qwen2-VL calls by this name the width of the language model.
            width=int(getattr(vision_config, "embed_dim", vision_config.hidden_size)),
            patches_per_token=self._merge**2,
            global_layers=None if windowed is None else tuple(windowed),
        )
        # The server does not run what comes after the state that is projected.
        del self._blocks[self.info.num_layers :]
        self._frames: dict[tuple[int, int], tuple[NDArray[Any], NDArray[Any]]] = {}

    @property
    def _is_native(self) -> bool:
        """Whether images keep their form, and patches come as rows that merge into tokens."""
        return hasattr(self._tower, "spatial_merge_size")

    @torch.inference_mode()
    def encode(self, image: Image.Image) -> Encoded:
        """Run the tower on one image; of a model with tiles, on the one that shows it whole."""
        inputs = self._inputs(image)
        states: dict[int, Tensor] = {}
        hooks = [
            block.register_forward_pre_hook(_keeper(states, layer))
            for layer, block in enumerate(self._blocks)
        ]
        last = self._blocks[self.info.num_layers - 1]
        hooks.append(last.register_forward_hook(_output_keeper(states, self.info.num_layers)))
        try:
            self._run(inputs)
        finally:
            for hook in hooks:
                hook.remove()
        grid = self._grid(inputs)
        kept = [self._patches(states[n], inputs, grid) for n in range(self.info.num_layers + 1)]
        self._check(kept, grid)
        black, white = self._frame(image.size)
        covered = (white - black).mean(axis=1) > _HALF * (white - black).max()
        valid = covered.reshape(-1, self.info.patches_per_token).mean(axis=1) >= _HALF
        return Encoded(kept, grid, valid)

    def areas(self, masks: Masks) -> Areas:
        """Send masks the way of the image, three at a time as the colors of a picture."""
        height, width = masks.shape[1:]
        black, white = self._frame((width, height))
        span = np.where(np.abs(white - black) < 1e-6, np.inf, white - black)
        shares = []
        for first in range(0, len(masks), 3):
            part = masks[first : first + 3]
            picture = np.zeros((height, width, 3), np.uint8)
            picture[..., : len(part)] = 255 * part.transpose(1, 2, 0)
            colors = self._colors(self._inputs(Image.fromarray(picture)))
            shares.append(((colors - black) / span)[:, : len(part)].T)
        patches = np.concatenate(shares).clip(0, 1)
        by_token = patches.reshape(len(masks), -1, self.info.patches_per_token)
        tokens: Areas = by_token.mean(axis=2).astype(np.float32)
        return tokens

    def view(self, image: Image.Image) -> Image.Image:
        """Undo the normalisation of what the processor made of an image."""
        inputs = self._inputs(image)
        pixels = self._pixels(inputs).float()
        if self._is_native:
            rows, columns = self._grid(inputs)
            # A patch holds two frames, in an image the same one twice.
            cells = pixels.view(rows, columns, self._merge, self._merge, 3, 2, self._patch, -1)
            pixels = cells[..., 0, :, :].permute(4, 0, 2, 5, 1, 3, 6).flatten(4).flatten(1, 3)
        mean, std = (
            torch.tensor(getattr(self._processor, name, None) or fallback).view(3, 1, 1)
            for name, fallback in (("image_mean", [0.0] * 3), ("image_std", [1.0] * 3))
        )
        colors = (255 * (pixels * std + mean)).round().clamp(0, 255).to(torch.uint8)
        return Image.fromarray(colors.permute(1, 2, 0).numpy())

    def _frame(self, size: tuple[int, int]) -> tuple[NDArray[Any], NDArray[Any]]:
        """What a black and a white image become, `(P, 3)`: where both are alike is padding."""
        if size not in self._frames:
            pair = [Image.new("RGB", size, color) for color in ("black", "white")]
            self._frames = {size: tuple(self._colors(self._inputs(image)) for image in pair)}  # type: ignore[dict-item]
        return self._frames[size]

    def _inputs(self, image: Image.Image) -> Mapping[str, Tensor]:
        inputs: Mapping[str, Tensor] = self._processor(images=[image], return_tensors="pt")
        return inputs

    def _pixels(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Rows of patches; or one picture, `(3, H, W)`, of tiles the one that shows all."""
        pixels = inputs["pixel_values"]
        while not self._is_native and pixels.dim() > 3:
            pixels = pixels[self._whole if pixels.dim() == 4 else 0]
        return pixels

    def _colors(self, inputs: Mapping[str, Tensor]) -> NDArray[Any]:
        """Mean color of each patch, `(P, 3)`, in the order of the states."""
        pixels = self._pixels(inputs).float()
        if self._is_native:
            colors = pixels.unflatten(-1, (3, -1)).mean(dim=-1)
        else:
            colors = nn.functional.avg_pool2d(pixels, self._patch).flatten(1).T
            colors = self._by_token(colors, self._grid(inputs))
        array: NDArray[Any] = colors.numpy()
        return array

    def _run(self, inputs: Mapping[str, Tensor]) -> None:
        parameter = next(self._tower.parameters())
        pixels = self._pixels(inputs).to(parameter.device, parameter.dtype)
        if self._is_native:
            self._tower(pixels, grid_thw=inputs["image_grid_thw"].to(parameter.device))
        else:
            self._tower(pixels.unsqueeze(0))

    def _grid(self, inputs: Mapping[str, Tensor]) -> tuple[int, int]:
        """Rows and columns of tokens."""
        if self._is_native:
            _, rows, columns = inputs["image_grid_thw"][0].tolist()
            return rows // self._merge, columns // self._merge
        height, width = self._pixels(inputs).shape[-2:]
        side = self._patch * self._merge
        return height // side, width // side

    def _patches(
        self, state: Tensor, inputs: Mapping[str, Tensor], grid: tuple[int, int]
    ) -> Tensor:
        """The rows of a state that are patches, in raster order of tokens, `(P, d)`."""
        rows = state.reshape(-1, state.shape[-1])[-grid[0] * grid[1] * self._merge**2 :]
        if not self._is_native:
            return self._by_token(rows, grid)
        if not hasattr(self._tower, "window_size"):
            return rows
        order, _ = get_vision_window_index(
            inputs["image_grid_thw"],
            spatial_merge_size=self._merge,
            window_size=self._tower.window_size,
            patch_size=self._patch,
        )
        by_token = rows.unflatten(0, (-1, self._merge**2))
        raster: Tensor = by_token[torch.argsort(order.to(rows.device))].flatten(0, 1)
        return raster

    def _by_token(self, rows: Tensor, grid: tuple[int, int]) -> Tensor:
        """Patches of a picture, `(P, ..)` row by row, with those of a token side by side."""
        cells = rows.view(grid[0], self._merge, grid[1], self._merge, -1)
        return cells.transpose(1, 2).flatten(0, 3)

    def _check(self, states: list[Tensor], grid: tuple[int, int]) -> None:
        shapes = {tuple(state.shape) for state in states}
        expected = (grid[0] * grid[1] * self.info.patches_per_token, self.info.width)
        if shapes != {expected}:
            raise CalibrationError(
                f"{self.info.name}: every block of the tower must pass on {expected[0]} patches of "
                f"width {expected[1]}, got {sorted(shapes)}; a hierarchical tower has no profile"
            )


def _keeper(states: dict[int, Tensor], layer: int) -> Any:
    def keep(_module: nn.Module, given: tuple[Any, ...]) -> None:
        states[layer] = given[0]

    return keep


def _output_keeper(states: dict[int, Tensor], layer: int) -> Any:
    def keep(_module: nn.Module, _given: tuple[Any, ...], output: Any) -> None:
        states[layer] = output[0] if isinstance(output, tuple) else output

    return keep


def _blocks_of(tower: nn.Module) -> nn.ModuleList:
    """The blocks of a tower: its longest list of modules."""
    lists = [module for module in tower.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda modules: len(modules), default=nn.ModuleList())


def _stated_depth(vision_config: Any) -> int:
    """How many blocks a configuration says; towers with several stages are no stack of blocks."""
    if getattr(vision_config, "depths", None) or getattr(vision_config, "embed_dims", None):
        raise CalibrationError(
            f"{vision_config.model_type} is a hierarchical tower: its states have no one shape, so "
            "no profile can describe it"
        )
    return int(getattr(vision_config, "num_hidden_layers", None) or vision_config.depth)


def _patches_merged(config: Any) -> int:
    """How many patches a token has along each side."""
    if ratio := getattr(config, "downsample_ratio", None):
        return round(1 / float(ratio))
    return int(getattr(getattr(config, "vision_config", config), "spatial_merge_size", 1) or 1)


def _layers_run(name: str, config: Any, depth: int) -> int:
    """How many blocks the server runs: up to the one whose output is projected."""
    layer = getattr(config, "vision_feature_layer", depth)
    if not isinstance(layer, int):
        raise CalibrationError(
            f"{name} projects the states of several layers, {layer}; a profile describes one"
        )
    return layer if layer >= 0 else depth + 1 + layer

"""Mini-Gemini in plain PyTorch, timm and Hugging Face, read from the published names.

Written as its authors describe it: keys and values for every position, one token at a time,
texts cut at the image. Shares no code with the product.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor
from timm.models.convnext import ConvNeXt
from torch import nn
from torch.nn import functional as F
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from msdg_vllm.core.profiles import EncoderProfile
from tests.engine.generation import Generated
from tests.engine.language_oracle import answer
from tests.reference import select_reference

_PREFIX_CLIP = "model.vision_tower.vision_tower.vision_model."
_PREFIX_AUX = "model.vision_tower_aux.vision_"


class MiniGeminiReference:
    """The same weights as the engine's, none of its code.

    Args:
        folder: The checkpoint as published.
        profile: Settings of the method.
        clip: Weights that replace those of the low-resolution tower, as its publisher names them.
        convnext: Weights that replace those of the high-resolution tower, likewise.
    """

    def __init__(
        self,
        folder: Path,
        profile: EncoderProfile,
        clip: Path | None = None,
        convnext: Path | None = None,
    ) -> None:
        self.folder = folder
        self.config = json.loads((folder / "config.json").read_text())
        self.profile = profile
        weights = load_file(folder / "model.safetensors")
        if clip is not None:
            for name, weight in torch.load(clip / "pytorch_model.bin").items():
                if name.startswith("vision_model.") and "position_ids" not in name:
                    weights[f"model.vision_tower.vision_tower.{name}"] = weight
        if convnext is not None:
            for name, weight in torch.load(convnext / "open_clip_pytorch_model.bin").items():
                if name.startswith(("visual.trunk.stem.", "visual.trunk.stages.")):
                    weights[_PREFIX_AUX + name.removeprefix("visual.trunk.")] = weight
        self.weights = weights
        self.clip = CLIPVisionModel(CLIPVisionConfig(**self.config["vision_config"])).eval()
        nested = any(name.startswith("vision_model.") for name in self.clip.state_dict())
        self._fill(self.clip, _PREFIX_CLIP, "vision_model." if nested else "")
        sizes = self.config["vision_aux_config"]
        self.aux = ConvNeXt(
            depths=tuple(sizes["depths"]), dims=tuple(sizes["widths"]), num_classes=0
        ).eval()
        self._fill(self.aux, _PREFIX_AUX, "", allow_missing=("head.",))
        language = {key: self.config[key] for key in LlamaConfig().to_dict() if key in self.config}
        language.pop("architectures"), language.pop("model_type")
        self.language = LlamaForCausalLM(LlamaConfig(**language)).eval()
        self.language.load_state_dict(
            {n: w for n, w in weights.items() if n in self.language.state_dict()}
        )
        self.known: dict[bytes, tuple[list[torch.Tensor], list[dict[int, torch.Tensor]]]] = {}
        self.pieces = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))

    def _fill(
        self, module: nn.Module, prefix: str, own: str, allow_missing: tuple[str, ...] = ()
    ) -> None:
        named = {
            own + name.removeprefix(prefix): weight
            for name, weight in self.weights.items()
            if name.startswith(prefix)
        }
        result = module.load_state_dict(named, strict=False)
        assert not result.unexpected_keys
        assert all(name.startswith(allow_missing) for name in result.missing_keys if allow_missing)
        assert allow_missing or not result.missing_keys

    def _connect(self, name: str, tokens: torch.Tensor) -> torch.Tensor:
        """LayerNorm and Linear of one of the three projections of mining."""
        norm, linear = (
            {k: self.weights[f"model.vlm_uni_{name}_projector.{i}.{k}"] for k in ("weight", "bias")}
            for i in (0, 1)
        )
        return F.linear(F.layer_norm(tokens, tokens.shape[-1:], **norm, eps=1e-5), **linear)

    def pixels(self, image: Image.Image) -> tuple[torch.Tensor, torch.Tensor]:
        """High-resolution pixels `(1, 3, S, S)`, and tiles `(T, 3, s, s)`, the whole one last."""
        side = max(image.size)
        left, top = (side - image.width) // 2, (side - image.height) // 2
        border = (left, top, side - image.width - left, side - image.height - top)
        square = ImageOps.expand(image.convert("RGB"), border, fill=(122, 116, 104))
        size, tile = self.config["image_size_aux"], self.config["vision_config"]["image_size"]
        processor = CLIPImageProcessorPil(
            size={"height": size, "width": size}, crop_size={"height": size, "width": size}
        )
        high = torch.as_tensor(processor(square, return_tensors="pt")["pixel_values"])
        grid = self.config["image_grid"]
        low = F.interpolate(high, size=(tile * grid, tile * grid), mode="bilinear")
        if grid == 1:
            return high, low
        tiles = [
            low[:, :, row * tile : (row + 1) * tile, column * tile : (column + 1) * tile]
            for row in range(grid)
            for column in range(grid)
        ]
        tiles.append(F.interpolate(low, size=(tile, tile), mode="bilinear"))
        return high, torch.cat(tiles)

    def maps(self, high: torch.Tensor) -> torch.Tensor:
        """Maps behind each tile, in the order of the tiles."""
        x = self.aux.stem(high)
        stages = []
        for stage in self.aux.stages:
            x = stage(x)
            stages.append(x)
        side = stages[0].shape[-1]
        a = torch.cat([F.interpolate(s, size=(side, side), mode="bilinear") for s in stages], 1)
        grid = self.config["image_grid"]
        if grid == 1:
            return a
        half = side // grid
        parts = [
            a[:, :, row * half : (row + 1) * half, column * half : (column + 1) * half]
            for row in range(grid)
            for column in range(grid)
        ]
        parts.append(F.interpolate(a, scale_factor=1 / grid, mode="bilinear"))
        return torch.cat(parts)

    def mined(self, token: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
        """One token `(d,)` after it has looked at its cell `(positions, C)`."""
        query = self._connect("query", token)
        keys, values = self._connect("aux", cell), self._connect("val", cell)
        attention = (keys @ query / len(query) ** 0.5).softmax(0)
        return token + attention @ values

    @torch.no_grad()
    def tokens(
        self, image: Image.Image
    ) -> tuple[list[torch.Tensor], list[dict[int, torch.Tensor]]]:
        """Finished tokens and CLIP states of each tile, the whole image first; made once."""
        if (key := image.tobytes()) in self.known:
            return self.known[key]
        high, tiles = self.pixels(image)
        maps = self.maps(high)
        finished, states = [], []
        for tile, a in zip(tiles, maps, strict=True):
            hidden = self.clip(tile[None], output_hidden_states=True).hidden_states
            features = hidden[self.config["mm_vision_select_layer"]][0, 1:]
            states.append({layer: hidden[layer][0, 1:] for layer in self.profile.layers})
            side = round(len(features) ** 0.5)
            cell = a.shape[-1] // side
            rows = []
            for i, token in enumerate(features):
                row, column = divmod(i, side)
                area = a[:, row * cell : (row + 1) * cell, column * cell : (column + 1) * cell]
                rows.append(self.mined(token, area.flatten(1).T))
            x = torch.stack(rows)
            for i in (0, 2):
                if i:
                    x = F.gelu(x)
                x = F.linear(
                    x,
                    self.weights[f"model.mm_projector.{i}.weight"],
                    self.weights[f"model.mm_projector.{i}.bias"],
                )
            finished.append(x)
        if len(finished) > 1:
            finished, states = [finished[-1], *finished[:-1]], [states[-1], *states[:-1]]
        self.known[key] = finished, states
        return finished, states

    @torch.no_grad()
    def kept(self, image: Image.Image, query: str, budget: int | None, scope: str) -> torch.Tensor:
        """Rows of an image that the language model reads; `budget` is per tile, None keeps all."""
        finished, states = self.tokens(image)
        if budget is None:
            return torch.cat(finished)
        if scope == "image":
            budget *= len(finished)
            states = [{n: torch.cat([tile[n] for tile in states]) for n in self.profile.layers}]
            finished = [torch.cat(finished)]
        query_ids = self.pieces.encode(query)
        embedded = self.language.get_input_embeddings()(torch.tensor(query_ids, dtype=torch.int64))
        rows = []
        for x, tile_states in zip(finished, states, strict=True):
            selection = select_reference(
                {n: state.numpy() for n, state in tile_states.items()},
                x.numpy(),
                embedded.numpy(),
                budget,
                self.profile,
            )
            assert selection.margin > 1, "too close for float32: choose another picture"
            rows.append(x[selection.keep])
        return torch.cat(rows)

    def prompt_ids(self, prompt: str) -> list[list[int]]:
        """The prompt cut at the images; each text tokenised alone, the first after a BOS."""
        texts = [self.pieces.encode(text) for text in prompt.split("<image>")]
        return [[self.pieces.bos_id(), *texts[0]], *texts[1:]]

    def generate(
        self,
        prompt: str,
        images: list[Image.Image],
        *,
        query: str = "",
        budget: int | None = None,
        scope: str = "tile",
    ) -> Generated:
        """Greedy answer to a prompt with `<image>` in it."""
        rows = [self.kept(image, query, budget, scope) for image in images]
        return answer(self.language.model, self.language.lm_head, self.prompt_ids(prompt), rows)

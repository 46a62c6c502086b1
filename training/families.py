"""Families: what training has to know of an architecture."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import (
    CLIPImageProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from training import llava, qwen
from training.canvas import Canvas, Square
from training.pool import Pool
from training.symbols import Symbols
from training.tokenizer import build_qwen_tokenizer, build_tokenizer

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
Form = tuple[int, int]  # rows and columns of tokens


@dataclass(frozen=True, slots=True)
class Encoded:
    """What a tower makes of some tokens of B pictures."""

    tokens: Tensor  # (B, n, D), projected
    states: list[Tensor]  # after each layer, (B, n, d)
    summary: Tensor | None  # (B, d), where the tower has a class token


class Family(Protocol):
    """One architecture, as the training script uses it."""

    canvas: Canvas
    state_width: int  # of a token's state in the tower
    early_layers: int
    spelling_layer: int
    mixed_precision: bool  # whether to train linear layers in bfloat16
    counting_weight: float  # of a count among the answers; those of two and more are rare
    taught_half_way: bool  # whether to teach what a count and a choice build on, too
    steps: Mapping[str, int]  # of stages that take another number of steps than usual
    opening: str  # what comes before the visual tokens in a chat
    closing: str  # and right after them

    def tokenizer(self) -> PreTrainedTokenizerFast: ...

    def build(self, tokenizer: PreTrainedTokenizerFast) -> Any: ...

    def start(self, model: Any, symbols: Symbols, opening: Tensor) -> None:
        """Finish what of the model's start depends on the symbols."""

    def processor(self, tokenizer: PreTrainedTokenizerFast) -> Any:
        """Return what turns chats and pictures of any form into the model's inputs."""

    def published_name(self, name: str) -> str:
        """Name a weight as published checkpoints do."""

    def vision_parts(self, model: Any) -> list[torch.nn.Module]:
        """Return tower and projector."""

    def choose_scenes(self, pool: Pool, number: int, rng: np.random.Generator) -> np.ndarray:
        """Return scenes that can be batched: of one form."""

    def encode(
        self, model: Any, pixels: np.ndarray, seen: Tensor | None, form: Form, early: bool
    ) -> Encoded: ...

    def positions(self, patches: Tensor, form: Form) -> tuple[Tensor, int]:
        """Return positions of opening, visual tokens and closing, and where text goes on.

        Args:
            patches: Which of the picture's tokens there are, `(B, n)`.
            form: Of the picture.
        """

    def offsets(self, centers: Tensor, patches: Tensor, form: Form) -> Tensor | None:
        """Return from each patch to each item's centre `(B, n, I, 2)`, if tokens shall tell it."""


class Llava:
    """LLaVA-1.5: pictures squashed to a square, positions in a row."""

    canvas: Canvas = Square(llava.IMAGE_SIDE, llava.GRID)
    state_width = llava.TOWER_WIDTH
    early_layers = llava.EARLY_LAYERS
    spelling_layer = llava.SPELLING_LAYER
    mixed_precision = False
    counting_weight = 1.0
    taught_half_way = False
    steps: Mapping[str, int] = MappingProxyType({})
    opening = "USER:"
    closing = ""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return build_tokenizer()

    def build(self, tokenizer: PreTrainedTokenizerFast) -> Any:
        return llava.build_llava(tokenizer)

    def start(self, model: Any, symbols: Symbols, opening: Tensor) -> None:
        pass

    def processor(self, tokenizer: PreTrainedTokenizerFast) -> Any:
        side = {"height": llava.IMAGE_SIDE, "width": llava.IMAGE_SIDE}
        images = CLIPImageProcessor(
            size=side,
            crop_size=side,
            do_center_crop=False,
            image_mean=list(CLIP_MEAN),
            image_std=list(CLIP_STD),
        )
        return LlavaProcessor(
            image_processor=images,
            tokenizer=tokenizer,
            patch_size=llava.PATCH_SIDE,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=tokenizer.chat_template,
        )

    def published_name(self, name: str) -> str:
        for ours, published in (
            ("model.vision_tower.", "vision_tower.vision_model."),
            ("model.multi_modal_projector.", "multi_modal_projector."),
            ("model.language_model.", "language_model.model."),
            ("lm_head.", "language_model.lm_head."),
        ):
            if name.startswith(ours):
                return published + name.removeprefix(ours)
        raise ValueError(f"no published name for weight {name!r}")

    def vision_parts(self, model: Any) -> list[torch.nn.Module]:
        return [model.model.vision_tower, model.model.multi_modal_projector]

    def choose_scenes(self, pool: Pool, number: int, rng: np.random.Generator) -> np.ndarray:
        return rng.integers(len(pool), size=number)

    def encode(
        self, model: Any, pixels: np.ndarray, seen: Tensor | None, form: Form, early: bool
    ) -> Encoded:
        scaled = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
        mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (CLIP_MEAN, CLIP_STD))
        num_layers = self.early_layers if early else -1
        tokens, states = llava.encode_pictures(model, (scaled - mean) / std, seen, num_layers)
        return Encoded(tokens, [state[:, 1:] for state in states], states[-1][:, 0])

    def positions(self, patches: Tensor, form: Form) -> tuple[Tensor, int]:
        batch, number = patches.shape
        return torch.arange(1 + number).expand(batch, -1), 1 + number

    def offsets(self, centers: Tensor, patches: Tensor, form: Form) -> Tensor | None:
        return None


class Qwen:
    """Qwen2.5-VL: pictures of their own form, positions by row and column."""

    canvas: Canvas = qwen.CANVAS
    limits = qwen.CANVAS
    state_width = qwen.PATCHES * qwen.WIDTH
    early_layers = qwen.EARLY_LAYERS
    spelling_layer = qwen.SPELLING_LAYER
    mixed_precision = True
    counting_weight = 3.0
    taught_half_way = True
    # It starts with more of what it needs, and a step on whole pictures costs twice as much.
    steps: Mapping[str, int] = MappingProxyType(
        {"words": 1200, "grid": 1500, "align": 1000, "spell": 1600, "pictures": 400}
    )
    opening = "USER:<|vision_start|>"
    closing = "<|vision_end|>"

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return build_qwen_tokenizer()

    def build(self, tokenizer: PreTrainedTokenizerFast) -> Any:
        model = qwen.build_qwen(tokenizer)
        llava.start_as_a_lookup(model)
        qwen.start_with_context(model)
        return model

    def start(self, model: Any, symbols: Symbols, opening: Tensor) -> None:
        qwen.start_with_places(model, symbols.place_directions, opening)
        qwen.prepare_mixed_precision(model)

    def processor(self, tokenizer: PreTrainedTokenizerFast) -> Any:
        layout = {
            "patch_size": qwen.PATCH_SIDE,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {
                "shortest_edge": self.limits.min_pixels,
                "longest_edge": self.limits.max_pixels,
            },
            "image_mean": list(CLIP_MEAN),
            "image_std": list(CLIP_STD),
        }
        return Qwen2_5_VLProcessor(
            image_processor=Qwen2VLImageProcessor(**layout),
            video_processor=Qwen2VLVideoProcessor(**layout),
            tokenizer=tokenizer,
            chat_template=tokenizer.chat_template,
        )

    def published_name(self, name: str) -> str:
        for ours, published in (
            ("model.visual.", "visual."),
            ("model.language_model.", "model."),
            ("lm_head.", "lm_head."),
        ):
            if name.startswith(ours):
                return published + name.removeprefix(ours)
        raise ValueError(f"no published name for weight {name!r}")

    def vision_parts(self, model: Any) -> list[torch.nn.Module]:
        return [model.model.visual]

    def choose_scenes(self, pool: Pool, number: int, rng: np.random.Generator) -> np.ndarray:
        # Codes are cut anywhere unless a picture is square: other forms have more to teach than
        # their number says.
        weights = np.array([len(scenes) for scenes in pool.by_form]) ** 0.5
        alike = pool.by_form[rng.choice(len(weights), p=weights / weights.sum())]
        return alike[rng.integers(len(alike), size=number)]

    def encode(
        self, model: Any, pixels: np.ndarray, seen: Tensor | None, form: Form, early: bool
    ) -> Encoded:
        batch, number = len(pixels), form[0] * form[1]
        shown = torch.from_numpy(pixels)[:, :number]
        numbers = torch.arange(number).expand(batch, -1) if seen is None else seen
        shown = shown.gather(1, numbers.unsqueeze(-1).expand(-1, -1, shown.shape[-1]))
        mean, std = (torch.tensor(v).view(3, 1) for v in (CLIP_MEAN, CLIP_STD))
        scaled = shown.view(batch, -1, qwen.PATCHES, 3, qwen.PATCH_SIDE**2).float() / 255
        normal = ((scaled - mean) / std).flatten(2)
        num_layers = self.early_layers if early else None
        tokens, states = qwen.encode_tokens(model, normal, numbers, form, num_layers)
        return Encoded(tokens, states, None)

    def positions(self, patches: Tensor, form: Form) -> tuple[Tensor, int]:
        batch = len(patches)
        base = 2
        start = base + max(form)
        rows, columns = base + patches // form[1], base + patches % form[1]
        visual = torch.stack([torch.full_like(rows, base), rows, columns])  # (3, B, n)
        opening = torch.arange(base).expand(3, batch, -1)
        closing = torch.full((3, batch, 1), start)
        return torch.cat([opening, visual, closing], dim=-1), start + 1

    def offsets(self, centers: Tensor, patches: Tensor, form: Form) -> Tensor | None:
        middles = torch.stack([patches % form[1], patches // form[1]], dim=-1) + 0.5
        size = torch.tensor([form[1], form[0]])
        return (centers * size).unsqueeze(1) - middles.unsqueeze(2)


class FineQwen(Qwen):
    """The same, with pictures of many sizes at their own resolution."""

    canvas: Canvas = qwen.FINE_CANVAS
    limits = qwen.FINE_CANVAS

    def choose_scenes(self, pool: Pool, number: int, rng: np.random.Generator) -> np.ndarray:
        assert pool.forms is not None
        one = rng.integers(len(pool))
        alike = (pool.forms == pool.forms[one]).all(1) & (pool.sharpness == pool.sharpness[one])
        return rng.choice(np.flatnonzero(alike), size=number)


FAMILIES: dict[str, Family] = {"llava": Llava(), "qwen": Qwen(), "fine": FineQwen()}

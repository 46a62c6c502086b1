"""Mini-Gemini's configuration: a flat Llama one, with a few keys for the vision half."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, CLIPVisionConfig, LlamaConfig

# CLIP-ViT-L/14 at 336 pixels: published checkpoints name it by a path only.
_CLIP_LARGE_336 = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 768,
}
# ConvNeXt-Large, likewise.
_CONVNEXT_LARGE = {"depths": [3, 3, 27, 3], "widths": [192, 384, 768, 1536]}
# Choices that all published checkpoints share, and this implementation with them.
_ONLY = {
    "mm_projector_type": "mlp2x_gelu",
    "mm_vision_select_feature": "patch",
    "mm_use_im_start_end": False,
    "image_aspect_ratio": "pad",
}


class MGMConfig(LlamaConfig):
    """Configuration of the checkpoints that call themselves `mgm`.

    Keys beside those of Llama, as published: `image_size_aux`, `image_grid`, `image_global`,
    `mm_vision_select_layer`. Keys of our own, all optional: `vision_config` and
    `vision_aux_config` (towers of other sizes), `image_token_index`, and the folders in
    `vision_tower_folder` and `vision_tower_aux_folder`, whose weights then take the place of
    those in the checkpoint.
    """

    model_type = "mgm"

    def __post_init__(self, **kwargs: Any) -> None:
        self.vision_config: Any = CLIPVisionConfig(
            **{**_CLIP_LARGE_336, **_plain(kwargs.pop("vision_config", None))}
        )
        self.vision_aux_config = {
            **_CONVNEXT_LARGE,
            **(kwargs.pop("vision_aux_config", None) or {}),
        }
        self.image_size_aux = int(kwargs.pop("image_size_aux", 768))
        self.image_grid = int(kwargs.pop("image_grid", 1))
        self.image_global = bool(kwargs.pop("image_global", False))
        # The first id behind the vocabulary: the model never predicts it.
        self.image_token_index = int(kwargs.pop("image_token_index", self.vocab_size))
        self.vision_feature_layer = int(kwargs.pop("mm_vision_select_layer", -2))
        self.vision_tower_folder = kwargs.pop("vision_tower_folder", None)
        self.vision_tower_aux_folder = kwargs.pop("vision_tower_aux_folder", None)
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
        self._check()

    def _check(self) -> None:
        for key, only in _ONLY.items():
            if (value := getattr(self, key, only)) != only:
                raise ValueError(f"{key} must be {only!r} in a Mini-Gemini model, got {value!r}")
        # Each token looks at the square of high-resolution positions behind its own patch.
        positions = self.image_size_aux // 4
        if self.image_size_aux % 32 or positions % (self.image_grid * self.tokens_per_side):
            raise ValueError(
                f"image_size_aux must be a multiple of 32 and cover a grid of "
                f"{self.image_grid} x {self.tokens_per_side} tokens with whole cells of 4-pixel "
                f"positions, got {self.image_size_aux}; correct config.json"
            )
        if self.image_grid > 1 and not self.image_global:
            raise ValueError(
                f"image_grid {self.image_grid} without image_global is not supported: "
                "the published HD checkpoints have both"
            )

    @property
    def tokens_per_side(self) -> int:
        """Tokens along one side of a tile."""
        return int(self.vision_config.image_size // self.vision_config.patch_size)

    @property
    def tokens_per_tile(self) -> int:
        """Tokens of one tile."""
        return self.tokens_per_side**2

    @property
    def num_tiles(self) -> int:
        """Tiles of every image: one, or the whole image and the cells of the grid."""
        return 1 if self.image_grid == 1 else 1 + self.image_grid**2


class MiniGeminiConfig(MGMConfig):
    """Configuration of the checkpoints that still carry the model's first name."""

    model_type = "mini_gemini"


def register_configs() -> None:
    """Let transformers, and so vLLM, read both spellings; calling it again changes nothing."""
    for config_class in (MGMConfig, MiniGeminiConfig):
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)


def _plain(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    return dict(config) if isinstance(config, dict) else dict(config.to_dict())

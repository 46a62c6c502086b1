"""Mini-Gemini without pruning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import SupportsMultiModal, SupportsPP
from vllm.model_executor.models.llava import LlavaMultiModalProjector, init_vision_tower_for_llava
from vllm.model_executor.models.module_mapping import MultiModelKeys
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    init_vllm_registered_model,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors

from msdg_vllm.models.mini_gemini.config import MGMConfig
from msdg_vllm.models.mini_gemini.convnext import ConvNextTower, resize
from msdg_vllm.models.mini_gemini.mining import PatchInfoMining, squares_of
from msdg_vllm.models.mini_gemini.processor import IMAGE_TOKEN
from msdg_vllm.models.mini_gemini.weights import WEIGHT_NAMES, folder_weights


class MiniGemini(nn.Module, SupportsMultiModal, SupportsPP):
    """CLIP tokens, filled from ConvNeXt maps, projected, read by a Llama."""

    hf_to_vllm_mapper = WEIGHT_NAMES
    packed_modules_mapping = {  # noqa: RUF012 - vLLM's protocol
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        if modality.startswith("image"):
            return IMAGE_TOKEN
        raise ValueError(f"Mini-Gemini takes images, got {modality}")

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: Any = vllm_config.model_config.hf_config
        self.config: MGMConfig = config
        self.secondary_weights = folder_weights(config)
        self.configure_mm_token_handling(config.vocab_size, [config.image_token_index])
        width = config.vision_config.hidden_size
        with self._mark_tower_model(vllm_config, "image"):
            self.vision_tower = init_vision_tower_for_llava(
                config,
                quant_config=None,
                require_post_norm=False,
                prefix=maybe_prefix(prefix, "vision_tower"),
            )
            # Replicated under tensor parallelism: convolutions have no sharded form in vLLM.
            self.vision_tower_aux = ConvNextTower(**config.vision_aux_config)
            self.mining = PatchInfoMining(width, sum(config.vision_aux_config["widths"]))
            self.multi_modal_projector = LlavaMultiModalProjector(
                vision_hidden_size=width,
                text_hidden_size=config.hidden_size,
                projector_hidden_act="gelu",
                multimodal_projector_bias=True,
                prefix=maybe_prefix(prefix, "multi_modal_projector"),
            )
        with self._mark_language_model(vllm_config):
            language_model: Any = init_vllm_registered_model(
                vllm_config=vllm_config,
                hf_config=config,
                prefix=maybe_prefix(prefix, "language_model"),
                architectures=["LlamaForCausalLM"],
            )
        self.language_model = language_model
        self.make_empty_intermediate_tensors = language_model.make_empty_intermediate_tensors

    def embed_multimodal(self, **kwargs: Any) -> list[torch.Tensor]:
        if kwargs.get("pixel_values") is None:
            return []
        return [
            self.project(self.mine(self.clip_features(tiles), self.high_resolution_maps(pixels)))
            # One image at a time: the maps of one take about a gigabyte.
            for tiles, pixels in zip(
                kwargs["pixel_values"], kwargs["pixel_values_aux"], strict=True
            )
        ]

    def clip_features(self, tiles: torch.Tensor) -> torch.Tensor:
        """Tokens of the low-resolution tower, `(T, N, d)`."""
        features: torch.Tensor = self.vision_tower(tiles, feature_select_strategy="default")
        return features

    def high_resolution_maps(self, pixels: torch.Tensor) -> torch.Tensor:
        """Maps behind each tile of an image, `(T, C, H, W)`."""
        maps = self.vision_tower_aux(pixels.unsqueeze(0))
        grid = self.config.image_grid
        if grid == 1:
            return maps
        _, channels, height, width = maps.shape
        size = (height // grid, width // grid)
        cells = maps.view(channels, grid, size[0], grid, size[1]).permute(1, 3, 0, 2, 4)
        return torch.cat([resize(maps, size), cells.flatten(0, 1)])

    def mine(self, features: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
        """Fill all tokens of an image, tile by tile: `(T, N, d)` to `(T * N, d)`."""
        side = self.config.tokens_per_side
        return torch.cat(
            [
                self.mining(tokens, squares_of(tile, side).flatten(0, 1).flatten(1, 2))
                for tokens, tile in zip(features, maps, strict=True)
            ]
        )

    def project(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens as the language model reads them, `(.., D)`."""
        projected: torch.Tensor = self.multi_modal_projector(tokens)
        return projected

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor | IntermediateTensors:
        if intermediate_tensors is not None:
            inputs_embeds = None
        language_model: Any = self.language_model
        hidden: torch.Tensor | IntermediateTensors = language_model.model(
            input_ids, positions, intermediate_tensors, inputs_embeds=inputs_embeds
        )
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        language_model: Any = self.language_model
        logits: torch.Tensor | None = language_model.compute_logits(hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        # vLLM compares the names that come back with all parameters, and names what is missing.
        loaded: set[str] = AutoWeightsLoader(self).load_weights(
            weights, mapper=self.hf_to_vllm_mapper
        )
        return loaded

    def get_mm_mapping(self) -> MultiModelKeys:
        return MultiModelKeys.from_string_field(
            language_model="language_model",
            connector=["mining", "multi_modal_projector"],
            tower_model=["vision_tower", "vision_tower_aux"],
        )

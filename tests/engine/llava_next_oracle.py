"""LLaVA-NeXT pruned with Hugging Face transformers and the literal reference of Algorithm 1."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import AutoProcessor, LlavaNextForConditionalGeneration

from msdg_vllm.core.profiles import EncoderProfile
from tests.engine.generation import Generated
from tests.engine.language_oracle import answer
from tests.reference import select_reference


class LlavaNextOracle:
    """The same weights as the engine's, none of its code."""

    def __init__(self, folder: Path) -> None:
        self.model = LlavaNextForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        self.processor = AutoProcessor.from_pretrained(folder)
        self.profile = EncoderProfile.load(folder / "msdg_profile.json")

    def reading_order(self, image: Image.Image, num_tiles: int, num_tokens: int) -> list[int]:
        """Positions (tile * N + token) as Hugging Face packs them, newlines left out."""
        positions = torch.arange(num_tiles * num_tokens).view(num_tiles, num_tokens, 1)
        (packed,), _ = self.model.model.pack_image_features(
            [positions],
            torch.tensor([[image.height, image.width]]),
            vision_feature_select_strategy="default",
            image_newline=torch.tensor([-1]),
        )
        return [int(position) for position in packed.flatten() if position >= 0]

    @torch.no_grad()
    def keep(
        self, image: Image.Image, query: str, shares: list[int] | int
    ) -> tuple[torch.Tensor, list[int]]:
        """Projected tokens of all tiles, and the kept ones in reading order.

        Args:
            image: The picture.
            query: The question.
            shares: The budget of each tile, or one budget for one run over all tiles.
        """
        inputs = self.processor.image_processor(image, return_tensors="pt")
        tower = self.model.model.vision_tower
        query_ids = self.processor.tokenizer.encode(query, add_special_tokens=False)
        embedded = self.model.get_input_embeddings()(torch.tensor(query_ids, dtype=torch.int64))
        states, tokens = [], []
        for tile in inputs["pixel_values"][0]:
            hidden = tower(tile[None], output_hidden_states=True).hidden_states
            states.append({layer: hidden[layer][0, 1:] for layer in self.profile.layers})
            tokens.append(self.model.model.multi_modal_projector(hidden[-2][0, 1:]))
        num_tiles, num_tokens = len(tokens), len(tokens[0])
        order = self.reading_order(image, num_tiles, num_tokens)
        visual = torch.cat(tokens)
        if isinstance(shares, int):
            whole = {n: torch.cat([tile[n] for tile in states]) for n in self.profile.layers}
            selection = select_reference(
                {n: state[order].numpy() for n, state in whole.items()},
                visual[order].numpy(),
                embedded.numpy(),
                shares,
                self.profile,
            )
            assert selection.margin > 1, "too close for float32: choose another picture"
            return visual, [order[i] for i in selection.keep]
        kept: set[int] = set()
        for t, (tile_states, tile_tokens, share) in enumerate(
            zip(states, tokens, shares, strict=True)
        ):
            valid = np.isin(np.arange(num_tokens) + t * num_tokens, order)
            if share == 0:
                continue
            selection = select_reference(
                {n: state.numpy() for n, state in tile_states.items()},
                tile_tokens.numpy(),
                embedded.numpy(),
                share,
                self.profile,
                valid=valid,
            )
            assert selection.margin > 1, "too close for float32: choose another picture"
            kept |= {t * num_tokens + i for i in selection.keep}
        return visual, [position for position in order if position in kept]

    def generate(
        self, prompt: str, images: list[tuple[Image.Image, str, list[int] | int]]
    ) -> Generated:
        """Greedy answer to a prompt whose images keep (query, budgets) tokens each."""
        embedded = []
        for image in images:
            visual, kept = self.keep(*image)
            embedded.append(visual[kept])
        return answer(
            self.model.model.language_model,
            self.model.lm_head,
            [
                self.processor.tokenizer.encode(text, add_special_tokens=False)
                for text in prompt.split("<image>")
            ],
            embedded,
        )

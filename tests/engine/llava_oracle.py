"""LLaVA-1.5 pruned with Hugging Face transformers and the literal reference of Algorithm 1."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration

from msdg_vllm.profiles import EncoderProfile
from tests.engine.generation import Generated
from tests.reference import select_reference


class LlavaOracle:
    """The same weights as the engine's, none of its code."""

    def __init__(self, folder: Path) -> None:
        self.model = LlavaForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        self.processor = AutoProcessor.from_pretrained(folder)
        self.profile = EncoderProfile.load(folder / "msdg_profile.json")

    @torch.no_grad()
    def keep(self, image: Image.Image, query: str, budget: int) -> tuple[torch.Tensor, list[int]]:
        """Projected tokens of an image, and which of them the method keeps."""
        pixels = self.processor.image_processor(image, return_tensors="pt")["pixel_values"]
        tower = self.model.model.vision_tower
        states = tower(pixels, output_hidden_states=True).hidden_states
        visual = self.model.model.multi_modal_projector(states[-2][0, 1:])
        query_ids = self.processor.tokenizer.encode(query, add_special_tokens=False)
        embedded = self.model.get_input_embeddings()(torch.tensor(query_ids, dtype=torch.int64))
        selection = select_reference(
            {layer: states[layer][0, 1:].numpy() for layer in self.profile.layers},
            visual.numpy(),
            embedded.numpy(),
            budget,
            self.profile,
        )
        assert selection.margin > 1, "a decision too close for float32: choose another picture"
        return visual, selection.keep

    @torch.no_grad()
    def generate(
        self,
        prompt: str,
        images: Sequence[tuple[Image.Image, str, int]],
        *,
        max_tokens: int = 6,
    ) -> Generated:
        """Greedy answer to a prompt whose images keep (query, budget) tokens each."""
        tokenizer: Any = self.processor.tokenizer
        embed = self.model.get_input_embeddings()
        rows = []
        prompt_ids: list[int] = []
        pieces = prompt.split("<image>")
        image_token_id = tokenizer.convert_tokens_to_ids("<image>")
        for piece, picture in zip(pieces, [*images, None], strict=True):
            piece_ids = tokenizer.encode(piece, add_special_tokens=False)
            prompt_ids += piece_ids
            rows.append(embed(torch.tensor(piece_ids, dtype=torch.int64)))
            if picture is not None:
                visual, kept = self.keep(*picture)
                prompt_ids += [image_token_id] * len(kept)
                rows.append(visual[kept])
        embeddings = torch.cat(rows)[None]
        token_ids: list[int] = []
        logprobs: list[dict[int, float]] = []
        for _ in range(max_tokens):
            hidden = self.model.model.language_model(inputs_embeds=embeddings).last_hidden_state
            step = self.model.lm_head(hidden[0, -1]).log_softmax(-1)
            token_id = int(step.argmax())
            token_ids.append(token_id)
            logprobs.append(dict(enumerate(step.tolist())))
            embeddings = torch.cat([embeddings, embed(torch.tensor([[token_id]]))], dim=1)
        return Generated(prompt_ids, token_ids, logprobs)

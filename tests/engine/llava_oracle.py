"""LLaVA-1.5 pruned with Hugging Face transformers and the literal reference of Algorithm 1."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration

from msdg_vllm.core.profiles import EncoderProfile
from tests.engine.generation import Generated
from tests.engine.method_oracle import (
    TowerView,
    attention_map,
    choose,
    merged_rows,
    recorded,
)
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
    def keep(
        self, image: Image.Image, query: str, budget: int, method: str = "msdg"
    ) -> tuple[torch.Tensor, list[int]]:
        """The rows that the language model reads of an image, and which tokens they are."""
        pixels = self.processor.image_processor(image, return_tensors="pt")["pixel_values"]
        if method != "msdg":
            return self._keep_by(method, pixels, query, budget)
        tower = self.model.model.vision_tower
        states = tower(pixels, output_hidden_states=True).hidden_states
        visual = self.model.model.multi_modal_projector(states[-2][0, 1:])
        selection = select_reference(
            {layer: states[layer][0, 1:].numpy() for layer in self.profile.layers},
            visual.numpy(),
            self._embedded(query).numpy(),
            budget,
            self.profile,
        )
        assert selection.margin > 1, "a decision too close for float32: choose another picture"
        return visual[selection.keep], selection.keep

    def _keep_by(
        self, method: str, pixels: torch.Tensor, query: str, budget: int
    ) -> tuple[torch.Tensor, list[int]]:
        view = self.view(pixels, query)
        choice = choose(method, view, self.profile, budget)
        if not choice.rows:
            return view.visual[choice.keep], choice.keep
        rows = merged_rows(choice, view.visual)
        if method == "visionzip":  # merges in front of the projector
            rows = self.model.model.multi_modal_projector(rows)
        return rows, choice.keep

    @torch.no_grad()
    def view(self, pixels: torch.Tensor, query: str) -> TowerView:
        """All that methods may read of an image, from whole attention maps."""
        tower = self.model.model.vision_tower
        layers = dict(enumerate(tower.encoder.layers))
        with (
            recorded({n: layer.self_attn.q_proj for n, layer in layers.items()}) as queries,
            recorded({n: layer.self_attn.k_proj for n, layer in layers.items()}) as keys,
            recorded({n: layer.mlp for n, layer in layers.items()}) as updates,
        ):
            states = tower(pixels, output_hidden_states=True).hidden_states
        last, middle = len(layers) - 2, (len(layers) - 2) * 8 // 22
        heads = tower.config.num_attention_heads

        def parted(projected: torch.Tensor) -> torch.Tensor:
            return projected[0].unflatten(-1, (heads, -1))

        maps = {n: attention_map(parted(queries[n]), parted(keys[n])) for n in (middle, last)}
        return TowerView(
            states={n: state[0, 1:] for n, state in enumerate(states)},
            visual=self.model.model.multi_modal_projector(states[-2][0, 1:]),
            query=self._embedded(query),
            last=last,
            middle=middle,
            grid_width=tower.config.image_size // tower.config.patch_size,
            class_attention=maps[last][0, 1:],
            received={n: weights.mean(dim=0)[1:] for n, weights in maps.items()},
            keys=parted(keys[last]).mean(dim=1)[1:],
            updates={n: update[0, 1:] for n, update in updates.items()},
        )

    def _embedded(self, query: str) -> torch.Tensor:
        """Embeddings of the distinct tokens of a query."""
        query_ids = sorted(set(self.processor.tokenizer.encode(query, add_special_tokens=False)))
        embedded: torch.Tensor = self.model.get_input_embeddings()(
            torch.tensor(query_ids, dtype=torch.int64)
        )
        return embedded

    @torch.no_grad()
    def generate(
        self,
        prompt: str,
        images: Sequence[tuple[Image.Image, str, int] | tuple[Image.Image, str, int, str]],
        *,
        max_tokens: int = 6,
    ) -> Generated:
        """Greedy answer to a prompt whose images keep (query, budget, method) tokens each."""
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
                tokens, kept = self.keep(*picture)
                prompt_ids += [image_token_id] * len(kept)
                rows.append(tokens)
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

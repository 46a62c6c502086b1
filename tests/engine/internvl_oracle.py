"""InternVL pruned with Hugging Face transformers and the literal reference of Algorithm 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoProcessor, InternVLForConditionalGeneration

from msdg_vllm.core.profiles import EncoderProfile
from tests.engine.generation import Generated
from tests.engine.language_oracle import answer
from tests.engine.method_oracle import TowerView, attention_map, choose, merged_rows, recorded
from tests.reference import select_reference


def by_token(patches: torch.Tensor) -> torch.Tensor:
    """Values of patches, row by row, `(side * side, ..)`, put together by the tokens they make."""
    side = round(len(patches) ** 0.5)
    grid = patches.unflatten(0, (side // 2, 2, side // 2, 2))
    return grid.transpose(1, 2).flatten(0, 3)


class InternVLOracle:
    """The same weights as the engine's, none of its code."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = InternVLForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        self.processor = AutoProcessor.from_pretrained(folder)
        self.profile = EncoderProfile.load(folder / "msdg_profile.json")

    def tiles(self, image: Image.Image) -> torch.Tensor:
        """Pixels of an image's tiles, the thumbnail last."""
        inputs = self.processor.image_processor(image, crop_to_patches=True, return_tensors="pt")
        pixels: torch.Tensor = inputs["pixel_values"]
        return pixels

    @torch.no_grad()
    def keep(
        self, tile: torch.Tensor, query: str, budget: int, method: str = "msdg"
    ) -> torch.Tensor:
        """The kept rows of one tile."""
        layers = self.model.model.vision_tower.encoder.layer
        states: dict[int, torch.Tensor] = {}
        hooks = [
            layer.register_forward_pre_hook(
                lambda _module, inputs, n=n: states.update({n: inputs[0][0, 1:].clone()})
            )
            for n, layer in enumerate(layers)
        ]
        with (
            recorded({n: layer.attention.q_proj for n, layer in enumerate(layers)}) as queries,
            recorded({n: layer.attention.k_proj for n, layer in enumerate(layers)}) as keys,
            recorded({n: layer.mlp for n, layer in enumerate(layers)}) as updates,
        ):
            features = self.model.model.get_image_features(
                tile[None], vision_feature_layer=-1, vision_feature_select_strategy="default"
            )
        for hook in hooks:
            hook.remove()
        states[len(layers)] = features.last_hidden_state[0, 1:]
        states = {n: by_token(state) for n, state in states.items()}
        visual: torch.Tensor = features.pooler_output[0]
        query_ids = sorted(set(self.processor.tokenizer.encode(query, add_special_tokens=False)))
        embedded = self.model.get_input_embeddings()(torch.tensor(query_ids))
        if method == "msdg":
            selection = select_reference(
                {n: states[n].numpy() for n in self.profile.layers},
                visual.numpy(),
                embedded.numpy(),
                budget,
                self.profile,
                patches_per_token=4,
            )
            assert selection.margin > 1, "too close for float32: choose another picture"
            return visual[selection.keep]
        last = len(layers) - 1
        middle = min(range(len(layers)), key=lambda n: abs(n - last * 8 / 22))
        heads = {
            n: [x[n].squeeze(0).double().unflatten(-1, (2, -1)) for x in (queries, keys)]
            for n in {middle, last}
        }
        maps = {n: attention_map(q, k) for n, (q, k) in heads.items()}
        choice = choose(
            method,
            TowerView(
                states=states,
                visual=visual,
                query=embedded,
                last=last,
                middle=middle,
                grid_width=round(len(visual) ** 0.5),
                class_attention=by_token(maps[last][0, 1:]),
                received={n: by_token(m.mean(dim=0)[1:]) for n, m in maps.items()},
                keys=by_token(heads[last][1].mean(dim=1)[1:]),
                updates={
                    n: by_token((update.squeeze(0) * layers[n].lambda_2)[1:])
                    for n, update in updates.items()
                },
                patches=4,
            ),
            self.profile,
            budget,
        )
        if choice.rows:
            visual[choice.keep] = merged_rows(choice, visual)
        return visual[choice.keep]

    def generate(
        self,
        prompt: str,
        images: list[Image.Image],
        query: str,
        retention: float,
        method: str = "msdg",
    ) -> Generated:
        """Greedy answer to a prompt whose images are pruned alike."""
        rows = []
        for image in images:
            tiles = self.tiles(image)
            budget = max(1, int(self.processor.image_seq_length * retention + 0.5))
            rows.append(torch.cat([self.keep(tile, query, budget, method) for tile in tiles]))
        texts = prompt.replace("<IMG_CONTEXT>", "<img><IMG_CONTEXT></img>").split("<IMG_CONTEXT>")
        encode = self.processor.tokenizer.encode
        return answer(
            self.model.model.language_model,
            self.model.lm_head,
            [encode(text, add_special_tokens=False) for text in texts],
            rows,
        )

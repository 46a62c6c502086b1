"""Qwen's vision models pruned with Hugging Face and the literal reference of Algorithm 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.video_utils import VideoMetadata
from transformers.vision_utils import get_vision_window_index

from msdg_vllm.core.profiles import EncoderProfile
from tests.engine.generation import Generated
from tests.engine.method_oracle import (
    TowerView,
    attention_map,
    choose,
    merged_rows,
    recorded,
)
from tests.method_references.scaling import scaled_grid_reference
from tests.reference import select_reference

FRAMES_PER_SECOND = 2.0


@dataclass(frozen=True)
class Medium:
    """An image, or a video as an array of frames, and how much is kept of it, by which method."""

    content: Any
    query: str
    retention: float
    method: str = "msdg"
    has_sinks: bool = True  # so that a test which is to see them cannot miss them

    @property
    def is_video(self) -> bool:
        return isinstance(self.content, np.ndarray)


def turn(rows: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of coordinates by the angles of each patch: `(S, heads, c)`."""
    first, second = rows.double().chunk(2, dim=-1)
    cosine, sine = (x.double()[:, None, : first.shape[-1]] for x in (cosines, sines))
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class QwenOracle:
    """The same weights as the engine's, none of its code."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.processor = AutoProcessor.from_pretrained(folder)
        self.profile = EncoderProfile.load(folder / "msdg_profile.json")
        vision_config = self.model.config.vision_config
        self.num_levels = len(getattr(vision_config, "deepstack_visual_indexes", ()))

    @torch.no_grad()
    def encode(
        self, pixels: torch.Tensor, grid: torch.Tensor
    ) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        """States of one item by the layer they enter, in raster order of tokens, and its tokens.

        DeepStack levels stand behind a token's embedding.
        """
        tower = self.model.model.visual
        states: dict[int, torch.Tensor] = {}
        hooks = [
            block.register_forward_pre_hook(
                lambda module, inputs, layer=layer: states.update({layer: inputs[0].clone()})
            )
            for layer, block in enumerate(tower.blocks)
        ]
        hooks.append(
            tower.blocks[-1].register_forward_hook(
                lambda module, inputs, output: states.update({len(tower.blocks): output.clone()})
            )
        )
        output = tower(pixels, grid_thw=grid[None])
        for hook in hooks:
            hook.remove()
        raster = {layer: self.raster(state, grid) for layer, state in states.items()}
        levels = getattr(output, "deepstack_features", None) or ()
        return raster, torch.cat([output.pooler_output, *levels], dim=-1)

    def raster(self, values: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        """Values of patches, as the tower has them, in raster order of tokens."""
        tower = self.model.model.visual
        if not hasattr(tower, "window_size"):
            return values
        window_index, _ = get_vision_window_index(
            grid[None], spatial_merge_size=2, window_size=tower.window_size, patch_size=14
        )
        by_token = values.unflatten(0, (-1, 4))
        merged = torch.empty_like(by_token)
        merged[window_index] = by_token
        return merged.flatten(0, 1)

    @torch.no_grad()
    def keep(
        self, pixels: torch.Tensor, grid: torch.Tensor, medium: Medium
    ) -> tuple[torch.Tensor, list[int]]:
        """All tokens of an item as the language model may read them, and which are kept."""
        states, rows = self.encode(pixels, grid)
        visual = rows[:, : self.model.config.text_config.hidden_size]
        budget = max(1, int(len(visual) * medium.retention + 0.5))
        if budget == len(visual):
            return rows, list(range(budget))
        if medium.method != "msdg":
            choice = choose(
                medium.method,
                self.view(pixels, grid, medium.query, states, visual),
                self.profile,
                budget,
            )
            if choice.rows:
                visual[choice.keep] = merged_rows(choice, visual)
            return rows, choice.keep
        selection = select_reference(
            {layer: states[layer].numpy() for layer in self.profile.layers},
            visual.numpy(),
            self._embedded(medium.query).numpy(),
            budget,
            self.profile,
            patches_per_token=4,
        )
        assert selection.sinks or len(visual) < 10 or not medium.has_sinks, (
            "no sinks: the test would not see them"
        )
        assert selection.margin > 1, "a decision too close for float32: choose another picture"
        return rows, selection.keep

    @torch.no_grad()
    def view(
        self,
        pixels: torch.Tensor,
        grid: torch.Tensor,
        query: str,
        states: dict[int, torch.Tensor],
        visual: torch.Tensor,
    ) -> TowerView:
        """All that methods may read of an item, from whole attention maps of each frame."""
        tower = self.model.model.visual
        blocks = dict(enumerate(tower.blocks))
        angles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        hooks = [
            block.attn.register_forward_pre_hook(
                lambda _module, _inputs, kwargs, layer=layer: angles.update(
                    {layer: kwargs["position_embeddings"]}
                ),
                with_kwargs=True,
            )
            for layer, block in blocks.items()
        ]
        with (
            recorded({n: block.attn.qkv for n, block in blocks.items()}) as projected,
            recorded({n: block.mlp for n, block in blocks.items()}) as updates,
        ):
            tower(pixels, grid_thw=grid[None])
        for hook in hooks:
            hook.remove()
        last = len(blocks) - 1
        middle = min(
            getattr(tower, "fullatt_block_indexes", blocks), key=lambda n: abs(n - last * 8 / 22)
        )
        frames, height, width = grid.tolist()
        received, keys = {}, {}
        for layer in {middle, last}:
            query_rows, key_rows, _ = projected[layer].unflatten(-1, (3, 2, -1)).unbind(1)
            turned, keys[layer] = (
                turn(query_rows, *angles[layer]),
                turn(key_rows, *angles[layer]),
            )
            maps = [
                attention_map(q, k)
                for q, k in zip(
                    turned.split(height * width), keys[layer].split(height * width), strict=True
                )
            ]
            received[layer] = torch.cat([weights.sum(dim=0) for weights in maps]) / len(turned)
        return TowerView(
            states=states,
            visual=visual,
            query=self._embedded(query),
            last=last,
            middle=middle,
            grid_width=width // 2,
            received={n: self.raster(values, grid) for n, values in received.items()},
            keys=self.raster(keys[last].mean(dim=1), grid),
            updates={n: self.raster(update, grid) for n, update in updates.items()},
            patches=4,
            num_frames=frames,
        )

    def _embedded(self, query: str) -> torch.Tensor:
        """Embeddings of the distinct tokens of a query."""
        query_ids = sorted(set(self.processor.tokenizer.encode(query, add_special_tokens=False)))
        embedded: torch.Tensor = self.model.get_input_embeddings()(
            torch.tensor(query_ids, dtype=torch.int64)
        )
        return embedded

    def scaled(self, image: Image.Image, most: int) -> Image.Image:
        """The image at the largest size of its shape that has at most so many tokens."""
        sizes = self.processor.image_processor(images=[image], return_tensors="pt")
        _, height, width = sizes["image_grid_thw"][0].tolist()
        rows, columns = scaled_grid_reference(height // 2, width // 2, most)
        side = self.model.config.vision_config.patch_size * 2
        return image.resize((columns * side, rows * side), Image.Resampling.BICUBIC)

    def num_tokens(self, image: Image.Image) -> int:
        """Tokens of an image at its own size."""
        sizes = self.processor.image_processor(images=[image], return_tensors="pt")
        return int(sizes["image_grid_thw"][0].prod()) // 4

    def inputs(self, prompt: str, media: Sequence[Medium]) -> Any:
        """What Hugging Face's processor makes of a prompt and its images and videos."""
        videos = [medium.content for medium in media if medium.is_video]
        arguments: dict[str, Any] = {}
        if videos:
            arguments["videos"] = videos
            arguments["video_metadata"] = [
                VideoMetadata(
                    total_num_frames=len(video),
                    fps=FRAMES_PER_SECOND,
                    frames_indices=list(range(len(video))),
                )
                for video in videos
            ]
        if images := [medium.content for medium in media if not medium.is_video]:
            arguments["images"] = images
        return self.processor(
            text=[prompt], return_tensors="pt", return_mm_token_type_ids=True, **arguments
        )

    @torch.no_grad()
    def generate(
        self,
        prompt: str,
        media: Sequence[Medium],
        *,
        max_tokens: int = 6,
        token_shift: tuple[int, int, int] = (0, 0, 0),
        text_shift: int = 0,
        without_levels: bool = False,
    ) -> Generated:
        """Greedy answer to a prompt with pruned images or videos.

        `token_shift` and `text_shift` put an error on the positions of the visual tokens, and of
        the text behind them, and `without_levels` leaves DeepStack out, for tests of the tests.
        """
        inputs = self.inputs(prompt, media)
        model = self.model.model
        rope_arguments = {
            key: inputs[key]
            for key in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
            if key in inputs
        }
        positions, _ = model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], **rope_arguments
        )
        positions = positions[:, 0].clone()  # (3, L)
        ids = inputs["input_ids"][0]
        embeddings = self.model.get_input_embeddings()(ids)
        width = embeddings.shape[1]
        embeddings = torch.nn.functional.pad(embeddings, (0, width * self.num_levels))
        taken = torch.ones(len(ids), dtype=torch.bool)
        kinds = inputs["mm_token_type_ids"][0]
        last_visual = int(kinds.nonzero().max()) if kinds.any() else -1
        positions[:, last_visual + 1 :] += text_shift
        positions[:, kinds != 0] += torch.tensor(token_shift)[:, None]
        for kind, pixels_name, grid_name in (
            (1, "pixel_values", "image_grid_thw"),
            (2, "pixel_values_videos", "video_grid_thw"),
        ):
            chosen = [medium for medium in media if medium.is_video == (kind == 2)]
            if not chosen:
                continue
            spots = (kinds == kind).nonzero()[:, 0]
            grids = inputs[grid_name]
            pixels = inputs[pixels_name].split(grids.prod(-1).tolist())
            places = spots.split((grids.prod(-1) // 4).tolist())
            for medium, item_pixels, grid, place in zip(chosen, pixels, grids, places, strict=True):
                embeddings[place], kept = self.keep(item_pixels, grid, medium)
                taken[place] = False
                taken[place[kept]] = True
        if without_levels:
            embeddings[:, width:] = 0
        return self._decode(ids[taken], embeddings[taken], positions[:, taken], max_tokens)

    def _decode(
        self,
        ids: torch.Tensor,
        embeddings: torch.Tensor,
        positions: torch.Tensor,
        max_tokens: int,
    ) -> Generated:
        """Greedy decoding that recomputes everything at every step."""
        embed = self.model.get_input_embeddings()
        token_ids: list[int] = []
        logprobs: list[dict[int, float]] = []
        for _ in range(max_tokens):
            # A token of text has zeros for its levels, which add nothing.
            rows, *levels = embeddings.unflatten(1, (1 + self.num_levels, -1)).unbind(1)
            deepstack: dict[str, Any] = {}
            if levels:
                deepstack["visual_pos_masks"] = torch.ones(1, len(rows), dtype=torch.bool)
                deepstack["deepstack_visual_embeds"] = levels
            hidden = self.model.model.language_model(
                inputs_embeds=rows[None], position_ids=positions[:, None], **deepstack
            ).last_hidden_state
            step = self.model.lm_head(hidden[0, -1]).float().log_softmax(-1)
            token_ids.append(int(step.argmax()))
            logprobs.append(dict(enumerate(step.tolist())))
            latest = torch.nn.functional.pad(
                embed(torch.tensor(token_ids[-1:])), (0, rows.shape[1] * self.num_levels)
            )
            embeddings = torch.cat([embeddings, latest])
            positions = torch.cat([positions, positions[:, -1:] + 1], dim=1)
        return Generated(ids.tolist(), token_ids, logprobs)

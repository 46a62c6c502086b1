"""Inference: a saved model in this process, with what pruning reads of it laid open.

Stock transformers classes and the product's selection, none of the engine: each picture is encoded
once, and any number of selections of its tokens are read by the language model in batches.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision
from transformers.vision_utils import get_vision_window_index

from benchmarks.quality.questions import Question
from msdg_vllm.core.profiles import EncoderProfile

PROFILE = "msdg_profile.json"
# Larger batches are slower on a CPU: their tensors leave the cache.
_ROWS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Seen:
    """One picture after the encoder.

    Attributes:
        visual: Projected tokens, `(N, D)`.
        states: The state that enters each layer, and the last one's output, `(P, d)` each.
        attention: What the encoder's attention makes of each patch in the paper's ablation, `(P,)`.
        grid: Rows and columns of visual tokens.
    """

    visual: Tensor
    states: tuple[Tensor, ...]
    attention: Tensor
    grid: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Row:
    """One question about the tokens that were kept of one picture."""

    seen: Seen
    kept: Tensor  # (B,) ascending
    question: Question


class SceneModel(ABC):
    """A saved vision-language model; subclasses know their encoder and their positions."""

    patches_per_token: int

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.processor: Any = AutoProcessor.from_pretrained(folder)
        self.tokenizer: Any = self.processor.tokenizer
        self.model: Any = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa"
        ).eval()
        self.folder = folder
        self._embedding = self.model.get_input_embeddings()
        self._prompts: dict[str, tuple[list[int], list[int]]] = {}

    @cached_property
    def profile(self) -> EncoderProfile:
        """The settings of the method for this encoder; only selection needs them."""
        return EncoderProfile.load(self.folder / PROFILE)

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """L, the number of the encoder's layers."""

    @property
    @abstractmethod
    def output_layer(self) -> int:
        """Which state the projector reads; L is the last layer's output."""

    @abstractmethod
    def see(self, pictures: Sequence[Image.Image]) -> list[Seen]:
        """Encode pictures."""

    @abstractmethod
    def positions(self, row: Row, num_before: int, num_after: int) -> Tensor | None:
        """Return the positions of a row's tokens, `(3, T)`; None if they are simply counted."""

    def embed(self, text: str) -> Tensor:
        """Return the embeddings of a text's tokens, `(T, D)`."""
        return self._embed(self._encode(text))

    @torch.inference_mode()
    def right(self, rows: Sequence[Row]) -> list[bool]:
        """Tell for each row whether greedy decoding gives exactly the expected answer.

        Without decoding: an answer is given if every token of it, its end included, is the most
        likely one after those before it.
        """
        answered = [False] * len(rows)
        prepared = [self._prepare(row) for row in rows]
        order = sorted(range(len(rows)), key=lambda number: len(prepared[number][0]))
        for first in range(0, len(order), _ROWS_AT_ONCE):
            part = order[first : first + _ROWS_AT_ONCE]
            for number, is_right in zip(
                part, self._right([prepared[n] for n in part]), strict=True
            ):
                answered[number] = is_right
        return answered

    def _prepare(self, row: Row) -> tuple[Tensor, Tensor | None, list[int]]:
        """Embeddings `(T, D)` of prompt and answer, their positions, and the answer's tokens."""
        before, after = self._prompt(row.question.text)
        answer = [*self._encode(row.question.answer), self.tokenizer.eos_token_id]
        text = [*after, *answer]
        embedded = [self._embed(before), row.seen.visual[row.kept], self._embed(text)]
        return torch.cat(embedded), self.positions(row, len(before), len(text)), answer

    def _right(self, rows: Sequence[tuple[Tensor, Tensor | None, list[int]]]) -> list[bool]:
        # Padding comes last, where a causal model cannot see it from the answers.
        inputs = torch.nn.utils.rnn.pad_sequence([row[0] for row in rows], batch_first=True)
        arguments: dict[str, Any] = {}
        if rows[0][1] is not None:
            places = [row[1].T for row in rows if row[1] is not None]
            padded = torch.nn.utils.rnn.pad_sequence(places, batch_first=True)
            arguments["position_ids"] = padded.permute(2, 0, 1)  # (3, B, T)
        output = self.model.model.language_model(
            inputs_embeds=inputs, use_cache=False, **arguments
        ).last_hidden_state
        told = [
            state[len(embedded) - len(answer) - 1 : len(embedded) - 1]
            for state, (embedded, _, answer) in zip(output, rows, strict=True)
        ]
        said = self.model.lm_head(torch.cat(told)).argmax(-1)
        parts = said.split([len(answer) for _, _, answer in rows])
        return [part.tolist() == answer for part, (_, _, answer) in zip(parts, rows, strict=True)]

    def _prompt(self, question: str) -> tuple[list[int], list[int]]:
        """Tokens of a chat before and after its picture; a question is asked many times."""
        if question in self._prompts:
            return self._prompts[question]
        parts = [{"type": "image"}, {"type": "text", "text": question}]
        chat = self.processor.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True
        )
        before, after = chat.split(self.processor.image_token)
        self._prompts[question] = self._encode(before), self._encode(after)
        return self._prompts[question]

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def _embed(self, tokens: list[int]) -> Tensor:
        embedded: Tensor = self._embedding(torch.tensor(tokens, dtype=torch.int64))
        return embedded


class LlavaScenes(SceneModel):
    """LLaVA-1.5: one resolution, tokens counted one after the other."""

    patches_per_token = 1

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(folder, dtype)
        # Only this implementation gives the attention away.
        self.model.model.vision_tower.set_attn_implementation("eager")

    @property
    def num_layers(self) -> int:
        return int(self.model.config.vision_config.num_hidden_layers)

    @property
    def output_layer(self) -> int:
        layer = int(self.model.config.vision_feature_layer)
        return layer if layer >= 0 else self.num_layers + 1 + layer

    @torch.inference_mode()
    def see(self, pictures: Sequence[Image.Image]) -> list[Seen]:
        pixels = self.processor.image_processor(list(pictures), return_tensors="pt").pixel_values
        output = self.model.model.vision_tower(
            pixels.to(self.model.dtype), output_hidden_states=True, output_attentions=True
        )
        layer = self.model.config.vision_feature_layer
        states = [state[:, 1:] for state in output.hidden_states]
        # The class token's view in the layer whose output is projected, as in the paper.
        attention = output.attentions[layer][:, :, 0, 1:].mean(dim=1)
        visual = self.model.model.multi_modal_projector(states[layer])
        side = round(visual.shape[1] ** 0.5)
        return [
            Seen(visual[row], tuple(state[row] for state in states), attention[row], (side, side))
            for row in range(len(pictures))
        ]

    def positions(self, row: Row, num_before: int, num_after: int) -> Tensor | None:
        return None


class QwenScenes(SceneModel):
    """Qwen2.5-VL: any resolution, windows, four patches to a token, M-RoPE."""

    patches_per_token = 4

    @property
    def num_layers(self) -> int:
        return len(self.model.model.visual.blocks)

    @property
    def output_layer(self) -> int:
        return self.num_layers

    @torch.inference_mode()
    def see(self, pictures: Sequence[Image.Image]) -> list[Seen]:
        return [self._see(picture) for picture in pictures]

    def positions(self, row: Row, num_before: int, num_after: int) -> Tensor | None:
        rows, columns = row.seen.grid
        before = torch.arange(num_before).expand(3, -1)
        places = torch.stack([torch.zeros_like(row.kept), row.kept // columns, row.kept % columns])
        # Text goes on behind the whole picture, whatever was kept of it.
        after = torch.arange(num_after).expand(3, -1) + num_before + max(rows, columns)
        return torch.cat([before, places + num_before, after], dim=1)

    def _see(self, picture: Image.Image) -> Seen:
        tower = self.model.model.visual
        inputs = self.processor.image_processor([picture], return_tensors="pt")
        grid = inputs.image_grid_thw
        entering: list[Tensor] = []
        received: list[Tensor] = []
        hooks = [
            block.register_forward_pre_hook(lambda _, given: entering.append(given[0].clone()))
            for block in tower.blocks
        ]
        hooks.append(
            tower.blocks[-1].attn.register_forward_pre_hook(
                lambda module, states, given: received.append(
                    _received_attention(module, *states, **given)
                ),
                with_kwargs=True,
            )
        )
        try:
            output = tower(inputs.pixel_values, grid_thw=grid)
        finally:
            for hook in hooks:
                hook.remove()
        order = self._raster_order(grid)
        states = [*entering, output.last_hidden_state]
        merge = tower.spatial_merge_size
        return Seen(
            visual=output.pooler_output,
            states=tuple(_in_order(state, order) for state in states),
            attention=_in_order(received[0].unsqueeze(-1), order).squeeze(-1),
            grid=(int(grid[0, 1]) // merge, int(grid[0, 2]) // merge),
        )

    def _raster_order(self, grid: Tensor) -> Tensor:
        """For each token of the picture, row by row, its place among the tower's windows."""
        tower = self.model.model.visual
        window_index, _ = get_vision_window_index(
            grid,
            spatial_merge_size=tower.spatial_merge_size,
            window_size=tower.window_size,
            patch_size=tower.patch_size,
        )
        return torch.argsort(window_index)


def _in_order(values: Tensor, order: Tensor) -> Tensor:
    """Patches `(P, d)` with their tokens put in another order."""
    return values.view(len(order), -1, values.shape[-1])[order].flatten(0, 1)


def _received_attention(
    attention: Any,
    states: Tensor,
    *,
    cu_seqlens: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    **_: Any,
) -> Tensor:
    """Mean attention that each patch receives over heads and queries of a layer, `(P,)`."""
    width = (len(states), 3, attention.num_heads, -1)
    queries, keys, _values = attention.qkv(states).reshape(width).unbind(1)
    queries, keys = apply_rotary_pos_emb_vision(queries, keys, *position_embeddings)
    logits = torch.einsum("qhd,khd->hqk", queries, keys) * attention.scaling
    window = torch.bucketize(torch.arange(len(states)), cu_seqlens, right=True)
    logits = logits.masked_fill(window[:, None] != window, -torch.inf)
    received: Tensor = logits.softmax(dim=-1).mean(dim=(0, 1))
    return received


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> SceneModel:
    """Return the model saved in a folder, as a family that is known here."""
    families = {"llava": LlavaScenes, "qwen2_5_vl": QwenScenes}
    kind = AutoConfig.from_pretrained(folder).model_type
    if kind not in families:
        raise ValueError(f"{folder}: model type must be one of {list(families)}, got {kind!r}")
    return families[kind](folder, dtype)

"""Packing: many questions in one sequence, each seeing only itself and the picture.

A packed question has the very positions and the very context it would have if it were asked alone,
so the picture is encoded once and training still equals serving.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.quality.scenes import MAX_ITEMS
from training.pool import BACKGROUND, Pool

IGNORED = -100


@dataclass(frozen=True, slots=True)
class PackedQuestions:
    """Text after the visual tokens, for B pictures; padded to T."""

    tokens: Tensor  # (B, T)
    labels: Tensor  # (B, T) the next token where it is part of an answer, else IGNORED
    segment: Tensor  # (B, T) number of the question, -1 for padding
    offset: Tensor  # (B, T) place within the question
    kinds: Tensor  # (B, T) index into KINDS


def sample_arrays(pool: Pool, scenes: np.ndarray) -> dict[str, Tensor]:
    """Return the ground truth of some scenes as tensors."""
    names = ("owner", "colors", "names", "characters", "centers", "character_widths")
    arrays = {name: torch.from_numpy(getattr(pool, name)[scenes]) for name in names}
    return {name: a if a.is_floating_point() else a.long() for name, a in arrays.items()}


def pack_questions(
    pool: Pool, scenes: np.ndarray, rng: np.random.Generator, num_questions: int
) -> PackedQuestions:
    """Choose up to `num_questions` of each scene's questions and lay them end to end."""
    rows: list[tuple[np.ndarray, ...]] = []
    for scene in scenes:
        there = np.flatnonzero(pool.kinds[scene] >= 0)
        chosen = rng.permutation(there)[:num_questions]
        tokens, labels, segment, offset, kinds = [], [], [], [], []
        for number, place in enumerate(chosen):
            length, prompt = int(pool.lengths[scene, place]), int(pool.prompt_lengths[scene, place])
            text = pool.tokens[scene, place, :length].astype(np.int64)
            label = np.full(length, IGNORED, np.int64)
            label[prompt - 1 : -1] = text[prompt:]
            tokens.append(text)
            labels.append(label)
            segment.append(np.full(length, number, np.int64))
            offset.append(np.arange(length))
            kinds.append(np.full(length, pool.kinds[scene, place], np.int64))
        parts = (tokens, labels, segment, offset, kinds)
        rows.append(tuple(np.concatenate(part) for part in parts))
    longest = max(len(row[0]) for row in rows)
    padded = [np.full((len(rows), longest), fill, np.int64) for fill in (0, IGNORED, -1, 0, -1)]
    for number, row in enumerate(rows):
        for array, part in zip(padded, row, strict=True):
            array[number, : len(part)] = part
    return PackedQuestions(*(torch.from_numpy(array) for array in padded))


def packed_mask(segment: Tensor, num_before: int) -> Tensor:
    """Return which key each query sees, `(B, 1, S, S)` True where it does; S = num_before + T."""
    num_rows, num_text = segment.shape
    size = num_before + num_text
    whole = torch.full((num_rows, size), -2, dtype=segment.dtype)
    whole[:, num_before:] = segment
    same = whole[:, :, None] == whole[:, None, :]
    picture = torch.zeros(size, dtype=torch.bool)
    picture[:num_before] = True
    causal = torch.ones(size, size, dtype=torch.bool).tril()
    return ((same | picture) & causal).unsqueeze(1)


def choose_glimpse(owner: Tensor, num_seen: int, generator: torch.Generator) -> Tensor:
    """Return `(B, num_seen)` ascending patches: all that an item touches, then background."""
    luck = torch.rand(owner.shape, generator=generator)
    rank = luck + (owner != BACKGROUND)
    return rank.topk(num_seen, dim=1).indices.sort(dim=1).values


def choose_patches(
    owner: Tensor,
    num_kept: int,
    generator: torch.Generator,
    one_per_item: bool = False,
    max_items: int = MAX_ITEMS,
) -> Tensor:
    """Return `(B, num_kept)` ascending patches: at least one of each item, the rest by chance.

    How much of an item survives varies from all of it to a single patch, from item to item, and so
    does how much of what items only touch, as it does under pruning.
    """
    num_rows, num_patches = owner.shape
    luck = torch.rand(num_rows, num_patches, generator=generator)
    shown = owner >= 0
    first = torch.zeros_like(shown)
    for item in range(int(owner.max()) + 1):
        mine = owner == item
        best = torch.where(mine, luck, -1.0).argmax(1, keepdim=True)
        first |= torch.zeros_like(shown).scatter(1, best, True) & mine
    favour = torch.rand(num_rows, max_items + 1, generator=generator) * 1.2
    favour = favour.gather(1, torch.where(shown, owner, max_items)) * (owner != BACKGROUND)
    rank = luck - shown.float() if one_per_item else luck + favour
    rank = torch.where(first, 9.0, rank)
    return rank.topk(num_kept, dim=1).indices.sort(dim=1).values

"""Symbols: what a visual token should be, said in the language model's own words.

The token of a patch that shows an item is the sum of the embeddings of the item's words (colour,
name, and that it is a shape if it is one), of the characters of its code by place, and of where
the item is: in the picture, or as seen from the patch if the language model knows where that is.
Sums train the language model before any picture is seen, and are then what the tower learns to
produce from pixels.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from benchmarks.quality.scenes import CHARACTERS, COLORS, MAX_CODE
from training.pool import BACKGROUND, NAMES
from training.tokenizer import PLURALS

_FREQUENCIES = (1, 2, 4, 8)
_REACH = 6.0  # tokens from a patch to the centre of its item that count as 1
_SIDES = ("left", "right", "above", "below")
_SIDE_STRENGTH = 0.5


class Symbols(nn.Module):
    """Word sums for the items of a scene; used in training only."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, embeddings: nn.Module, tower_width: int
    ) -> None:
        super().__init__()
        # In a tuple: the language model owns these weights, not this module.
        self._shared = (embeddings.get_parameter("weight"),)
        width = self.words.shape[1]
        ids = tokenizer.convert_tokens_to_ids
        self.color_ids = torch.tensor(ids([f" {word}" for word in COLORS]))
        self.name_ids = torch.tensor(ids([f" {word}" for word in NAMES]))
        self.shape_id = ids(" shape")
        self.characters = nn.Parameter(
            torch.randn(MAX_CODE, len(CHARACTERS) + 1, width) / width**0.5
        )
        self.background = nn.Parameter(torch.randn(width) / width**0.5)
        self.place = nn.Linear(2 + 4 * len(_FREQUENCIES), width, bias=False)
        nn.init.normal_(self.place.weight, 0, 0.6 / width**0.5)
        self._tie_word_forms(tokenizer)
        self._start_places(tokenizer)
        self.spelling = nn.Linear(tower_width, MAX_CODE * len(CHARACTERS))
        self.summary = nn.Linear(tower_width, len(COLORS) + len(NAMES))
        self.whereabouts = nn.Linear(width, 2)
        self.firsts = nn.Linear(width, 1)

    @torch.no_grad()
    def _tie_word_forms(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Start " circles" and "circle" next to " circle", as trained embeddings would be."""
        table = self.words
        index = tokenizer.convert_tokens_to_ids
        for word in (*COLORS, *NAMES, "shape", *_SIDES):
            plural = PLURALS.get(word, f"{word}s")
            for form in (word, plural, f" {plural}"):
                if form in tokenizer.get_vocab():
                    table[index(form)] = 0.9 * table[index(f" {word}")] + 0.3 * table[index(form)]

    @torch.no_grad()
    def _start_places(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Start what is left in the picture as a little " left", and so on for all sides.

        Otherwise comparing the places of two items does not begin to be learnt.
        """
        low_x, high_x, low_y, high_y = self.words[
            torch.tensor(tokenizer.convert_tokens_to_ids([f" {side}" for side in _SIDES]))
        ]
        self.place.weight[:, 0] = _SIDE_STRENGTH * (high_x - low_x)
        self.place.weight[:, 1] = _SIDE_STRENGTH * (high_y - low_y)

    @property
    def words(self) -> Tensor:
        return self._shared[0]

    @property
    def place_directions(self) -> Tensor:
        """What an item one patch further right, and one further down, adds to a token, `(D, 2)`."""
        return self.place.weight[:, :2] * 2 / _REACH

    def item_vectors(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the sum for each item, `(B, I, D)`; rows past the last item mean nothing."""
        colors, names, characters = (batch[name] for name in ("colors", "names", "characters"))
        vectors = self.words[self.color_ids[colors.clamp(min=0)]]
        vectors = vectors + self.words[self.name_ids[names.clamp(min=0)]]
        is_sign = (names == NAMES.index("sign")).unsqueeze(-1)
        vectors = vectors + self.words[self.shape_id] * ~is_sign
        for position in range(MAX_CODE):
            written = self.characters[position][characters[..., position]]  # -1: its last row
            vectors = vectors + written * is_sign
        if "offsets" not in batch:
            vectors = vectors + self.place(_place_features(batch["centers"] * 2 - 1))
        return vectors

    def visual_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the token of every patch, `(B, N, D)`, background where no item is."""
        items, owner = self.item_vectors(batch), batch["owner"]
        index = owner.clamp(min=0).unsqueeze(-1).expand(-1, -1, items.shape[-1])
        tokens = items.gather(1, index)
        if "offsets" in batch:
            tokens = tokens + self.place(_place_features(batch["offsets"] / _REACH))
        return torch.where((owner >= 0).unsqueeze(-1), tokens, self.background)


def _place_features(scaled: Tensor) -> Tensor:
    waves = [
        wave(scaled * (math.pi / 2 * frequency))
        for frequency in _FREQUENCIES
        for wave in (torch.sin, torch.cos)
    ]
    return torch.cat([2 * scaled, *waves], dim=-1)


def alignment_loss(symbols: Symbols, tokens: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Distance of `tokens` from the word sums, and how badly each word is read from them."""
    owner = batch["owner"]
    with torch.no_grad():
        target = symbols.visual_tokens(batch)
        words = symbols.words.detach()
        characters = symbols.characters.detach()
    shown, empty = owner >= 0, owner == BACKGROUND
    error = (tokens - target).square().sum(-1)
    loss = error[shown].mean() + error[empty].mean()
    row, patch = shown.nonzero(as_tuple=True)
    item = owner[row, patch]
    read = tokens[row, patch]
    readings: list[tuple[Tensor, Tensor, Tensor]] = [
        (read, words[symbols.color_ids], batch["colors"][row, item]),
        (read, words[symbols.name_ids], batch["names"][row, item]),
    ]
    signs = batch["names"][row, item] == NAMES.index("sign")
    last = characters.shape[1] - 1
    for position in range(MAX_CODE):
        written = batch["characters"][row, item, position][signs]
        written = torch.where(written < 0, last, written)
        readings.append((read[signs], characters[position], written))
    return loss + sum_of_readings(readings)


def sum_of_readings(readings: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Cross entropy of choosing the right row of a table by similarity, summed over tables."""
    total = torch.zeros(())
    for read, table, wanted in readings:
        if len(wanted):
            similarity = 6.0 * read @ functional.normalize(table, dim=-1).T
            total = total + functional.cross_entropy(similarity, wanted)
    return total


def spelling_loss(
    symbols: Symbols, states: Tensor, columns: Tensor, batch: dict[str, Tensor]
) -> Tensor:
    """How badly each patch of a sign tells from its early state which character it shows, and
    whether that is the first, second or third.

    A sign's tokens shall spell the whole code. That hardly starts to be learnt before single
    characters and their places are known; then it takes no more than adding them up.

    Args:
        symbols: Holds the reader.
        states: `(B, n, d)`.
        columns: Middle of each patch from left (0) to right (1), `(B, n)`.
        batch: The truth, with `owner` of those patches.
    """
    owner = batch["owner"]
    row, patch = (owner >= 0).nonzero(as_tuple=True)
    item = owner[row, patch]
    signs = batch["names"][row, item] == NAMES.index("sign")
    row, patch, item = row[signs], patch[signs], item[signs]
    if not len(row):
        return torch.zeros(())
    code = batch["characters"][row, item]  # (P, 3)
    length = (code >= 0).sum(-1)
    x = columns[row, patch]
    steps = (x - batch["centers"][row, item, 0]) / batch["character_widths"][row]
    place = (steps + (length - 1) / 2).round()
    place = torch.minimum(place.long().clamp(min=0), length - 1)
    wanted = place * len(CHARACTERS) + code.gather(1, place.unsqueeze(1)).squeeze(1)
    return functional.cross_entropy(symbols.spelling(states[row, patch]), wanted)


def summary_loss(symbols: Symbols, class_token: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """How badly the class token `(B, d)` tells which colours and names are in the picture.

    Nothing else would teach it anything, and selectors that read its attention would read noise.
    """
    there = torch.zeros(len(class_token), symbols.summary.out_features + 1)
    for offset, what in ((0, batch["colors"]), (len(COLORS), batch["names"])):
        there.scatter_(1, torch.where(what < 0, symbols.summary.out_features, what + offset), 1.0)
    said = symbols.summary(class_token)
    return functional.binary_cross_entropy_with_logits(said, there[:, :-1])


def update_size(states: Sequence[Tensor]) -> Tensor:
    """Mean length of the patches' updates from each of `states` `(B, n, d)` to the next."""
    sizes = [
        ((after - before).square().sum(-1) + 1e-4).sqrt().mean()
        for before, after in pairwise(states)
    ]
    return torch.stack(sizes).mean()

"""Lessons: what the language model learns to know half way, where answers build on it.

Comparing two places, counting items of several tokens each and picking an option hardly begin to be
learnt before the model knows what is compared, counted or picked.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from benchmarks.quality.questions import KINDS, LETTERS
from training.packing import PackedQuestions
from training.symbols import Symbols


def whereabouts_loss(
    symbols: Symbols, hidden: Tensor, packed: PackedQuestions, batch: dict[str, Tensor]
) -> Tensor:
    """How badly the place of an item is read where a question about positions names it.

    Comparing two places does not begin to be learnt before the places are known; this teaches
    the language model to look them up.

    Args:
        symbols: Holds the reader.
        hidden: The language model's state half way, `(B, T, D)`.
        packed: The questions.
        batch: The truth.
    """
    vocabulary = len(symbols.words)
    name_of, color_of = torch.full((2, vocabulary), -1)
    name_of[symbols.name_ids] = torch.arange(len(symbols.name_ids))
    color_of[symbols.color_ids] = torch.arange(len(symbols.color_ids))
    name = name_of[packed.tokens]
    color = color_of[packed.tokens].roll(1, dims=1)  # the colour word comes just before
    row, column = ((packed.kinds == KINDS.index("position")) & (name >= 0)).nonzero(as_tuple=True)
    if not len(row):
        return torch.zeros(())
    meant_name, meant_color = name[row, column, None], color[row, column, None]
    meant = (batch["names"][row] == meant_name) & (
        (batch["colors"][row] == meant_color) | (meant_color < 0)
    )
    place = batch["centers"][row, meant.int().argmax(1)] * 2 - 1
    state = functional.normalize(hidden[row, column], dim=-1) * hidden.shape[-1] ** 0.5
    return functional.mse_loss(symbols.whereabouts(state), place)


def firsts_loss(symbols: Symbols, hidden: Tensor, owner: Tensor) -> tuple[Tensor, float]:
    """How badly a visual token tells whether it is the first of its item, and how often it does.

    Counting items that have several tokens each takes no more than counting such.

    Args:
        symbols: Holds the reader.
        hidden: The language model's state half way at the visual tokens, `(B, n, D)`.
        owner: Of those tokens, `(B, n)`.
    """
    shown = owner >= 0
    again = (owner.unsqueeze(2) == owner.unsqueeze(1)).tril(-1).any(-1)[shown]
    state = functional.normalize(hidden[shown], dim=-1) * hidden.shape[-1] ** 0.5
    said = symbols.firsts(state).squeeze(-1)
    loss = functional.binary_cross_entropy_with_logits(said, (~again).float())
    return loss, ((said < 0) == again).float().mean().item()


@dataclass(frozen=True, slots=True)
class Choice:
    """A packed question with options; places are columns of its row."""

    row: int
    asked_at: int  # the last token before the options
    is_open: bool  # whether it has an answer before any option is named
    ends: list[int]  # the last token of each option
    right: int  # number of the right option


def read_choices(packed: PackedQuestions, tokenizer: PreTrainedTokenizerFast) -> list[Choice]:
    """Find the choices among packed questions.

    Those that ask which of the options is in the picture have no answer before these are named.
    """
    ids = tokenizer.get_vocab()
    line, dot, these = ids["\n"], ids["."], ids[" these"]
    letters = [ids[letter] for letter in LETTERS]
    is_choice = packed.kinds == KINDS.index("choice")
    choices = []
    for row in range(len(packed.tokens)):
        for number in packed.segment[row][is_choice[row]].unique().tolist():
            places = (packed.segment[row] == number).nonzero().flatten().tolist()
            text = packed.tokens[row, places].tolist()
            lines = [n for n, token in enumerate(text) if token == line]
            options = [
                (places[start], places[end - 1])
                for start, end in pairwise(lines)
                if text[start + 1] in letters and text[start + 2] == dot
            ]
            right = letters.index(int(packed.labels[row, places].max()))
            ends = [end for _, end in options]
            choices.append(Choice(row, options[0][0], these not in text, ends, right))
    return choices


def foreseen_options(
    choices: list[Choice], packed: PackedQuestions
) -> tuple[Tensor, Tensor, Tensor]:
    """Return where the question of an open choice has been read, and the word that answers it.

    Returns:
        Row and column in `packed` of the last token before the options, and the last token of the
        right option; `(n,)` each.
    """
    found = [(c.row, c.asked_at, c.ends[c.right]) for c in choices if c.is_open]
    rows, columns, ends = torch.tensor(found, dtype=torch.long).view(-1, 3).unbind(1)
    return rows, columns, packed.tokens[rows, ends]


def judged_options(
    choices: list[Choice], tokenizer: PreTrainedTokenizerFast
) -> tuple[Tensor, Tensor, Tensor]:
    """Return row and column of each option's last token, and "yes" if it is right.

    Returns:
        Rows, columns and tokens of "yes" or "no"; `(n,)` each.
    """
    ids = tokenizer.get_vocab()
    no, yes = ids["no"], ids["yes"]
    found = [
        (choice.row, end, yes if number == choice.right else no)
        for choice in choices
        for number, end in enumerate(choice.ends)
    ]
    rows, columns, verdicts = torch.tensor(found, dtype=torch.long).view(-1, 3).unbind(1)
    return rows, columns, verdicts

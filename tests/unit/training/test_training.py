"""Training sees what serving shows: packed questions equal single ones, and runs can resume."""

import numpy as np
import pytest
import torch

from training.canvas import Square
from training.lessons import firsts_loss, foreseen_options, judged_options, read_choices
from training.llava import GRID, IMAGE_SIDE, build_llava, encode_pictures
from training.packing import (
    IGNORED,
    choose_glimpse,
    choose_patches,
    pack_questions,
    packed_mask,
    sample_arrays,
)
from training.pool import BACKGROUND, UNCLEAR, Pool, _draw_chunk
from training.symbols import Symbols
from training.tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool(**_draw_chunk((0, 12, Square(IMAGE_SIDE, GRID), "train")))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return build_llava(build_tokenizer()).eval()


@torch.inference_mode()
def test_a_packed_question_is_answered_as_if_asked_alone(pool, model):
    scenes = np.array([3])
    packed = pack_questions(pool, scenes, np.random.default_rng(0), 4)
    visual = torch.randn(1, 20, 128)
    opening = model.get_input_embeddings()(torch.tensor([[5]]))
    before = torch.arange(21).unsqueeze(0)
    text = model.get_input_embeddings()(packed.tokens)
    together = model.model.language_model(
        inputs_embeds=torch.cat([opening, visual, text], 1),
        attention_mask=packed_mask(packed.segment, 21),
        position_ids=torch.cat([before, 21 + packed.offset], 1),
    ).last_hidden_state[:, 21:]
    for number in range(4):
        mine = packed.segment == number
        alone = model.model.language_model(
            inputs_embeds=torch.cat([opening, visual, text[mine].unsqueeze(0)], 1)
        ).last_hidden_state[:, 21:]
        torch.testing.assert_close(together[mine], alone[0], atol=1e-5, rtol=1e-4)


def test_labels_are_the_answers_and_their_ends(pool):
    tokenizer = build_tokenizer()
    packed = pack_questions(pool, np.arange(4), np.random.default_rng(0), 3)
    for row in range(4):
        for number in range(3):
            mine = packed.segment[row] == number
            told = packed.labels[row][mine]
            answer = told[told != IGNORED].tolist()
            assert packed.tokens[row][mine].tolist()[-len(answer) :] == answer
            assert answer[-1] == tokenizer.eos_token_id


def test_what_is_foreseen_of_a_choice_is_its_right_option(pool):
    tokenizer = build_tokenizer()
    packed = pack_questions(pool, np.arange(12), np.random.default_rng(0), 12)
    rows, columns, words = foreseen_options(read_choices(packed, tokenizer), packed)
    assert len(words) > 6
    for row, column, word in zip(rows, columns, words, strict=True):
        mine = packed.segment[row] == packed.segment[row, column]
        asked, *options, _, _, answer = (
            tokenizer.decode(packed.tokens[row][mine]).strip().split("\n")
        )
        read = tokenizer.decode(packed.tokens[row][mine][: int(column - mine.int().argmax()) + 1])
        assert read.strip() == asked
        right = {option[0]: option[2:] for option in options}[answer.removesuffix("</s>")]
        assert tokenizer.decode(word).strip() == right.strip()


def test_only_the_right_option_of_a_choice_is_judged_right(pool):
    tokenizer = build_tokenizer()
    packed = pack_questions(pool, np.arange(12), np.random.default_rng(0), 12)
    rows, columns, verdicts = judged_options(read_choices(packed, tokenizer), tokenizer)
    judged: dict[tuple[int, int], list[str]] = {}
    for row, column, verdict in zip(rows.tolist(), columns.tolist(), verdicts, strict=True):
        assert tokenizer.decode(packed.tokens[row, column + 1]) == "\n"
        question = (row, int(packed.segment[row, column]))
        judged.setdefault(question, []).append(tokenizer.decode(verdict))
    assert len(judged) > 6
    for (row, number), said in judged.items():
        letter = packed.labels[row][packed.segment[row] == number].max()
        assert said == ["yes" if mine == tokenizer.decode(letter) else "no" for mine in "ABCD"]


@torch.inference_mode()
def test_the_first_token_of_an_item_is_the_one_that_none_of_it_precedes():
    tokenizer = build_tokenizer()
    symbols = Symbols(tokenizer, torch.nn.Embedding(len(tokenizer), 8), 8)
    symbols.firsts.weight.copy_(torch.eye(8)[:1] * 9)
    symbols.firsts.bias.zero_()
    owner = torch.tensor([[BACKGROUND, 0, 1, 0, 1, UNCLEAR, 2], [1, 1, 1, BACKGROUND, 0, 0, 1]])
    first = torch.tensor([[0, 1, 1, 0, 0, 0, 1], [1, 0, 0, 0, 1, 0, 0]]).bool()
    told = torch.zeros(2, 7, 8)
    told[..., 0] = torch.where(first, 1.0, -1.0)
    loss, share = firsts_loss(symbols, told, owner)
    assert share == 1.0
    assert loss < 1e-6
    told[0, 4, 0] = 1.0
    _, share = firsts_loss(symbols, told, owner)
    assert share == pytest.approx(10 / 11)


@torch.inference_mode()
def test_training_encodes_pictures_as_the_model_itself_does(model):
    pixels = torch.randn(2, 3, IMAGE_SIDE, IMAGE_SIDE)
    states = model.model.vision_tower(pixels, output_hidden_states=True).hidden_states
    expected = model.model.multi_modal_projector(states[-2][:, 1:])
    torch.testing.assert_close(encode_pictures(model, pixels)[0], expected)
    every_patch = torch.arange(GRID * GRID).expand(2, -1)
    torch.testing.assert_close(encode_pictures(model, pixels, every_patch)[0], expected)


@pytest.mark.parametrize("one_per_item", [False, True])
def test_dropping_tokens_leaves_one_of_each_item(pool, one_per_item):
    owner = sample_arrays(pool, np.arange(12))["owner"]
    generator = torch.Generator().manual_seed(0)
    kept = choose_patches(owner, 12, generator, one_per_item)
    assert kept.shape == (12, 12)
    assert (kept.diff(dim=1) > 0).all()
    for mine, chosen in zip(owner, kept, strict=True):
        shown = mine[mine >= 0].unique().tolist()
        assert mine[chosen][mine[chosen] >= 0].unique().tolist() == shown
        if one_per_item:
            assert (mine[chosen] >= 0).sum() == len(shown)


def test_a_glimpse_shows_every_patch_an_item_touches(pool):
    owner = sample_arrays(pool, np.arange(12))["owner"]
    seen = choose_glimpse(owner, 60, torch.Generator().manual_seed(0))
    touched = (owner != BACKGROUND).sum(1)
    assert ((owner.gather(1, seen) != BACKGROUND).sum(1) == touched).all()

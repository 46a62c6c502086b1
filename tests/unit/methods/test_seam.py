"""What holds between the engine and every method."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from msdg_vllm.core.profiles import EncoderProfile
from msdg_vllm.methods import (
    METHODS,
    Encoder,
    Image,
    Method,
    Needs,
    Question,
    Signals,
    method_named,
    top_tokens,
    unmet_need,
)

PROFILE = EncoderProfile(
    direction_layers=(1, 6),
    saliency_window=(3, 5),
    sink_layer=2,
    sink_coordinate=3,
    sink_threshold=2.5,
    num_groups=5,
)
CLIP = Encoder(num_layers=7, profile=PROFILE)
QWEN = Encoder(
    num_layers=8,
    profile=PROFILE,
    has_class_token=False,
    global_layers=(3, 7),
    patches_per_token=4,
    free_resolution=True,
)
ROWS, COLUMNS, WIDTH = 5, 6, 16
NUM_TOKENS = ROWS * COLUMNS


def images_for(
    needs: Needs, encoder: Encoder, num_images: int = 3, places: torch.Tensor | None = None
) -> list[Image]:
    """Random images with everything that `needs` names; the first may have padding."""
    generator = torch.Generator().manual_seed(7)
    patches = NUM_TOKENS * encoder.patches_per_token

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    projection = random(WIDTH, WIDTH)
    return [
        Image(
            signals=Signals(
                states={n: random(patches, WIDTH) for n in (*needs.states, *needs.token_signals)},
                features=random(patches, WIDTH) if needs.features else None,
                class_attention={n: random(patches).softmax(-1) for n in needs.class_attention},
                received_attention={
                    n: random(patches).softmax(-1) for n in needs.received_attention
                },
                keys={n: random(patches, 8) for n in needs.keys},
                mlp_updates={n: random(patches).abs() for n in needs.mlp_updates},
            ),
            visual=random(NUM_TOKENS, WIDTH),
            encoder=encoder,
            grids=((ROWS, COLUMNS),),
            seed=11 + number,
            project=(lambda features: features @ projection)
            if encoder.patches_per_token == 1
            else None,
            places=None if number else places,
        )
        for number in range(num_images)
    ]


def fitting() -> list[tuple[str, Encoder]]:
    pairs = [(name, encoder) for name in METHODS for encoder in (CLIP, QWEN)]
    return [
        (name, encoder)
        for name, encoder in pairs
        if unmet_need(method_named(name).needs(encoder), encoder) is None
    ]


@pytest.mark.parametrize(("name", "encoder"), fitting())
def test_padding_is_as_if_it_were_not_there(name: str, encoder: Encoder) -> None:
    method = method_named(name)
    needs = method.needs(encoder)
    real = torch.arange(COLUMNS, NUM_TOKENS - COLUMNS)  # all rows but the first and the last
    images = images_for(needs, encoder, places=real)
    images[0] = replace(images[0], grids=((ROWS - 2, COLUMNS),))
    query = torch.randn(3, WIDTH)
    selection, *_ = method.select_all(method.analyze(images), [Question(9, query)] * 3)
    image = replace(images[0].without_padding(), query=query)
    assert image.num_tokens == len(real)
    expected = method.select(image, 9)
    assert selection.indices.tolist() == real[expected.indices].tolist()
    if selection.scores is not None and expected.scores is not None:
        torch.testing.assert_close(selection.scores[real], expected.scores)


@pytest.mark.parametrize(("name", "encoder"), fitting())
def test_images_of_one_call_have_their_own_questions_and_budgets(
    name: str, encoder: Encoder
) -> None:
    method = method_named(name)
    images = images_for(method.needs(encoder), encoder)
    query = torch.randn(3, WIDTH)
    questions = [Question(9, query), Question(5), Question(9, torch.randn(7, WIDTH))]
    selections = method.select_all(method.analyze(images), questions)
    for image, question, selection in zip(images, questions, selections, strict=True):
        expected = method.select(replace(image, query=question.query), question.budget)
        assert torch.equal(selection.indices, expected.indices)


def test_random_depends_on_the_content_and_draws_evenly() -> None:
    method = method_named("random")

    def drawn(seed: int, budget: int = 8) -> list[int]:
        image = Image(Signals(), torch.zeros(64, 1), CLIP, seed=seed)
        indices: list[int] = method.select(image, budget).indices.tolist()
        return indices

    assert drawn(5) == drawn(5) != drawn(6)
    assert drawn(5) != drawn(5 + 2**62)
    assert set(drawn(5)) < set(drawn(5, budget=20))
    counts = torch.bincount(torch.tensor([drawn(seed) for seed in range(2000)]).flatten())
    # 250 expected; five standard deviations of a binomial count.
    assert counts.shape == (64,)
    assert (counts - 250).abs().max() < 5 * (2000 * 8 / 64 * (1 - 8 / 64)) ** 0.5


@pytest.mark.parametrize(
    ("needs", "encoder", "words"),
    [
        (Needs(class_attention=(3,)), QWEN, "a class token, and this vision encoder has none"),
        (Needs(received_attention=(6,)), QWEN, "layer 6 across the whole image.*3, 7 have it"),
        (Needs(states=(9,)), CLIP, "layer 9, and this vision encoder runs 7 layers"),
        (Needs(keys=(7,)), CLIP, "layer 7, and this vision encoder runs 7 layers"),
        (Needs(states=(7,), keys=(6,), class_attention=(0,)), CLIP, None),
        (Needs(states=(8,), keys=(6,), received_attention=(3, 7)), QWEN, None),
    ],
)
def test_what_an_encoder_cannot_give_is_said(
    needs: Needs, encoder: Encoder, words: str | None
) -> None:
    missing = unmet_need(needs, encoder)
    if words is None:
        assert missing is None
    else:
        assert missing is not None
        assert re.search(words, missing)


def test_layers_named_for_one_encoder_are_found_in_another() -> None:
    large = replace(CLIP, num_layers=23)
    assert large.global_layer_near(8 / 22) == 8
    assert replace(QWEN, num_layers=32, global_layers=(7, 15, 23, 31)).global_layer_near(0.5) == 15
    assert CLIP.global_layer_near(0.0) == 0
    assert CLIP.global_layer_near(1.0) == CLIP.last_layer == 6


def test_needs_of_several_methods_join() -> None:
    both = Needs(states=(2, 5), query=True) | Needs(states=(5, 3), keys=(6,), features=True)
    assert both == Needs(states=(2, 3, 5), query=True, keys=(6,), features=True)


def test_top_tokens_breaks_ties_by_order_and_puts_what_is_not_finite_last() -> None:
    scores = torch.tensor([1.0, torch.nan, 2.0, 2.0, torch.inf, 2.0, 0.0])
    assert top_tokens(scores, 2).tolist() == [2, 3]
    assert top_tokens(scores, 5).tolist() == [0, 2, 3, 5, 6]
    assert top_tokens(scores, 7).tolist() == list(range(7))


def test_values_of_patches_are_averaged_over_tokens() -> None:
    image = Image(Signals(), torch.zeros(2, 1), QWEN)
    assert image.per_token(torch.arange(8)).tolist() == [1.5, 5.5]


def test_methods_load_neither_vllm_nor_transformers() -> None:
    code = (
        "import sys; from msdg_vllm.methods import METHODS, method_named; "
        "[method_named(name) for name in METHODS]; "
        "print(sorted({'vllm', 'transformers', 'pydantic'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_every_row_of_the_table_is_a_method() -> None:
    for name in METHODS:
        assert isinstance(method_named(name), Method), name
    assert next(iter(METHODS)) == "msdg"

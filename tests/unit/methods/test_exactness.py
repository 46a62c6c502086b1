"""Every method keeps the tokens that its literal float64 reference keeps."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from msdg_vllm.methods import METHODS, method_named
from tests.unit.methods.cases import KINDS, REFERENCES, make_image

SEEDS = range(48)
NEEDS_CLASS_TOKEN = {"cls_attention"}
# How many cases may be too close to call in float32.
CLOSE = 0.1


def test_every_method_has_a_reference() -> None:
    # The method of this package is tested in tests/unit/core, random tokens in test_seam.py, and
    # what becomes of an image that is scaled where there are images, in tests/engine.
    assert set(REFERENCES) == set(METHODS) - {"msdg", "random", "resize", "resize+msdg"}


@pytest.mark.parametrize("with_class_token", [True, False], ids=["class-token", "merged-patches"])
@pytest.mark.parametrize("name", REFERENCES)
def test_the_kept_tokens_are_those_of_the_reference(name: str, with_class_token: bool) -> None:
    if name in NEEDS_CLASS_TOKEN and not with_class_token:
        pytest.skip("reads a class token")
    wrong, num_close, num_cases = [], 0, 0
    for seed in SEEDS[:18] if name == "evocut" else SEEDS:  # its reference takes long
        kind = KINDS[seed % len(KINDS)]
        image = make_image(seed, kind, with_class_token=with_class_token)
        most = image.num_tokens
        drawn = random.Random(seed).randint(1, most)
        for budget in {drawn, (1, most, max(1, most // 3))[seed % 3]}:
            choice = method_named(name).select(image, budget)
            expected = REFERENCES[name](image, budget)
            num_cases += 1
            if not expected.is_clear:
                num_close += 1
            elif choice.indices.tolist() != expected.keep:
                wrong.append((seed, kind, budget))
    assert wrong == []
    assert num_close <= CLOSE * num_cases


@pytest.mark.parametrize("with_class_token", [True, False], ids=["projected", "as-they-are"])
def test_merged_rows_are_those_of_the_reference(with_class_token: bool) -> None:
    num_merged = 0
    for seed in SEEDS:
        image = make_image(seed, "clustered", with_class_token=with_class_token)
        if image.project is not None:
            assert image.signals.features is not None
            image = replace(image, visual=image.project(image.signals.features))
        budget = max(1, image.num_tokens // 3)
        choice = method_named("visionzip").select(image, budget)
        expected = REFERENCES["visionzip"](image, budget)
        if budget == 1:
            assert choice.embeddings is None
            continue
        assert choice.embeddings is not None
        rows = torch.from_numpy(np.stack(expected.rows)).float()
        if image.project is not None:
            rows = image.project(rows)
        if expected.is_clear:
            num_merged += 1
            torch.testing.assert_close(choice.embeddings, rows, rtol=1e-4, atol=1e-5)
    assert num_merged > len(SEEDS) // 3


@pytest.mark.parametrize("name", ["hiprune", "prunesid"])
def test_counts_that_only_large_budgets_reach_are_those_of_the_reference(name: str) -> None:
    # Several anchors; groups bounded by more than five tokens.
    num_clear = 0
    for seed, budget in enumerate((26, 75, 128)):
        image = make_image(seed, "clustered", num_tokens=140)
        expected = REFERENCES[name](image, budget)
        if expected.is_clear:
            num_clear += 1
            assert method_named(name).select(image, budget).indices.tolist() == expected.keep
    assert num_clear >= 2

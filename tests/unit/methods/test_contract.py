"""What every method promises, for any image and any budget."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.selection.peak_memory import PeakMemory
from msdg_vllm.core.errors import ShapeError
from msdg_vllm.methods import METHODS, Image, Question, Selection, method_named, top_tokens
from tests.unit.core.waiting import NoWaiting
from tests.unit.methods.cases import KINDS, make_image

# Their docstrings say where they wait for the device.
WAITING = {"prunesid"}
# Where tokens stand decides, or a number, and not what they are; see test_scaling.py for pooling.
UNSEEING = {"random", "pool", "resize"}
EVERY_METHOD = pytest.mark.parametrize("name", METHODS)

images = st.builds(
    lambda seed, kind, with_class_token: make_image(seed, kind, with_class_token=with_class_token),
    st.integers(0, 10_000),
    st.sampled_from(KINDS),
    st.booleans(),
)


def fed(name: str, image: Image) -> Image:
    """The image, or one with a class token for the method that needs it."""
    if name != "cls_attention" or image.encoder.has_class_token:
        return image
    return replace(image, encoder=replace(image.encoder, has_class_token=True))


def in_orders(image: Image, orders: Sequence[Tensor]) -> list[Image]:
    """One image per order of the tokens."""
    return [replace(image, places=order).without_padding() for order in orders]


def assert_same(ours: Selection, other: Selection) -> None:
    assert torch.equal(ours.indices, other.indices)
    assert (ours.embeddings is None) == (other.embeddings is None)
    if ours.embeddings is not None and other.embeddings is not None:
        assert torch.equal(ours.embeddings.nan_to_num(), other.embeddings.nan_to_num())


@EVERY_METHOD
@settings(max_examples=20, deadline=None)
@given(image=images, data=st.data())
def test_exactly_the_budget_is_kept_in_original_order(
    name: str, image: Image, data: st.DataObject
) -> None:
    image = fed(name, image)
    budget = data.draw(st.integers(1, image.num_tokens))
    selection = method_named(name).select(image, budget)
    kept = selection.indices.tolist()
    assert kept == sorted(set(kept))
    assert len(kept) == budget
    assert set(kept) <= set(range(image.num_tokens))
    if selection.embeddings is not None:
        assert selection.embeddings.shape == (budget, image.visual.shape[-1])
    assert_same(method_named(name).select(image, budget), selection)


@EVERY_METHOD
@settings(max_examples=6, deadline=None)
@given(image=images, data=st.data())
def test_a_row_is_the_same_alone_and_in_a_batch(
    name: str, image: Image, data: st.DataObject
) -> None:
    image, method = fed(name, image), method_named(name)
    count = image.num_tokens
    budget = data.draw(st.integers(1, count))
    orders = [torch.randperm(count, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    images = in_orders(image, orders)
    question = Question(budget, image.query)
    together = method.select_all(method.analyze(images), [question] * 3)
    for row, selection in zip(images, together, strict=True):
        (alone,) = method.select_all(method.analyze([row]), [question])
        assert_same(alone, selection)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in UNSEEING])
@pytest.mark.parametrize("with_class_token", [True, False])
def test_a_token_that_is_not_finite_is_kept_only_for_lack_of_others(
    name: str, with_class_token: bool
) -> None:
    for seed in range(10):
        image = fed(name, make_image(seed, "broken", with_class_token=with_class_token))
        finite = image.visual.isfinite().all(dim=-1)
        num_finite = int(finite.sum())
        if num_finite:
            kept = method_named(name).select(image, num_finite).indices
            assert finite[kept].all()


@pytest.mark.parametrize(
    "name",
    [
        "msdg",
        "cls_attention",
        "divprune",
        "prunesid",
        "cdpruner",
        "evocut",
        "dart0",
        "cen_divprune",
        "cen_cdpruner",
        "resize",
        "resize+msdg",
    ],
)
def test_a_flat_image_keeps_its_first_tokens(name: str) -> None:
    # Rounding must not decide between equal tokens, at any width.
    image = make_image(2, "flat", num_tokens=90)
    wide = torch.randn(1, 1000).expand(90, -1)
    image = replace(
        image,
        visual=wide,
        query=torch.randn(4, 1000),
        signals=replace(image.signals, features=wide),
    )
    assert method_named(name).select(image, 31).indices.tolist() == list(range(31))


@pytest.mark.parametrize("name", [name for name in METHODS if name not in WAITING])
@pytest.mark.parametrize("with_class_token", [True, False])
def test_no_operator_waits_for_the_device(name: str, with_class_token: bool) -> None:
    image = fed(name, make_image(1, "random", with_class_token=with_class_token, num_tokens=60))
    with NoWaiting() as mode:
        method_named(name).select(image, 27)
    assert "sort" in mode.seen


@pytest.mark.parametrize("name", [name for name in METHODS if name not in WAITING])
def test_extra_memory_grows_with_the_tokens_and_not_with_their_square(name: str) -> None:
    def peak(num_tokens: int) -> int:
        image = make_image(1, "random", num_tokens=num_tokens)
        with PeakMemory(image.visual, image.signals.states) as memory:
            method_named(name).select(image, 32)
        return memory.peak

    assert peak(2400) <= 2.1 * peak(1200)


def test_first_and_last_tokens_stand_before_and_behind_all_scores() -> None:
    scores = torch.tensor([5.0, 4.0, torch.nan, 2.0, 1.0])
    first = torch.tensor([False, False, True, False, True])
    last = torch.tensor([True, False, False, False, False])
    assert top_tokens(scores, 3, first=first).tolist() == [0, 2, 4]
    assert top_tokens(scores, 3, last=last).tolist() == [1, 3, 4]
    assert top_tokens(scores, 4, last=last).tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize("budget", [0, 7, 1.5])
def test_a_budget_beyond_the_tokens_is_refused(budget: int) -> None:
    with pytest.raises(ShapeError, match="budget must be an integer from 1 to 6, got"):
        top_tokens(torch.zeros(6), budget)


def test_rounding_decides_nothing_when_the_budget_nears_the_width_of_the_tokens() -> None:
    width = 64
    generator = torch.Generator().manual_seed(0)
    spectrum = torch.arange(1, width + 1) ** -2.0
    visual = torch.randn(300, width, generator=generator) * spectrum
    visual = visual @ torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
    query = torch.randn(5, width, generator=generator)
    image = replace(make_image(0, KINDS[0]), visual=visual, query=query)
    order = torch.randperm(width, generator=generator)
    # The same cosines, added up in another order.
    shuffled = replace(image, visual=visual[:, order], query=query[:, order])
    for budget in (width // 2, width - 4, width, 2 * width):
        kept, again = (method_named("cdpruner").select(i, budget) for i in (image, shuffled))
        assert kept.indices.tolist() == again.indices.tolist(), budget

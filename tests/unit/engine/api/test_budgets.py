"""What was asked for, within what the operator allows."""

from __future__ import annotations

import pytest
from vllm.multimodal.processing import PromptUpdateDetails

from msdg_vllm.core import num_kept_tokens
from msdg_vllm.core.errors import RequestError
from msdg_vllm.engine.api.budgets import Budgeting, largest_retention, shortened
from msdg_vllm.request import ItemTurn, PruningRequest
from msdg_vllm.settings import Settings

PAD = 8


def budget_at(retention: float) -> int:
    return num_kept_tokens(576, retention)


def budget(
    request: PruningRequest, item: ItemTurn | None = None, settings: Settings | None = None
) -> int:
    rules = Budgeting(settings or Settings())
    item = item or ItemTurn("")
    retention = rules.retention_of(item, request)
    return rules.budget(1.0 if retention is None else retention, item, request, budget_at)


@pytest.mark.parametrize(
    ("retention", "most", "kept"),
    [(0.5, None, 288), (0.5, 100, 100), (0.111, 100, 64), (None, 100, 100), (1.0, 9999, 576)],
)
def test_the_smaller_result_wins(retention: float | None, most: int | None, kept: int) -> None:
    assert budget(PruningRequest(retention, max_visual_tokens=most)) == kept


def test_an_images_own_words_win_over_the_requests() -> None:
    request = PruningRequest(0.5, max_visual_tokens=10)
    assert budget(request, ItemTurn("", 0.25, 200)) == 144
    assert budget(request, ItemTurn("", None, 200)) == 200
    assert budget(request, ItemTurn("", 0.25)) == 10


def test_the_servers_count_is_a_default() -> None:
    settings = Settings(max_visual_tokens=100)
    assert budget(PruningRequest(), settings=settings) == 100
    assert budget(PruningRequest(0.111), settings=settings) == 64
    assert budget(PruningRequest(max_visual_tokens=300), settings=settings) == 300


def test_a_servers_own_count_below_its_floor_refuses_nobody() -> None:
    settings = Settings(max_visual_tokens=100, min_retention=0.222)
    assert budget(PruningRequest(), settings=settings) == 100


def test_asking_for_less_than_the_floor_is_refused_with_its_name() -> None:
    settings = Settings(min_retention=0.222)
    with pytest.raises(RequestError, match=r"retention 0.1 is below .* send 0.222 or more"):
        budget(PruningRequest(0.1), settings=settings)
    with pytest.raises(RequestError, match=r"send 128 or more for this image"):
        budget(PruningRequest(max_visual_tokens=100), settings=settings)
    assert budget(PruningRequest(0.222, max_visual_tokens=128), settings=settings) == 128


def test_a_request_that_keeps_too_much_is_told_where_it_would_fit() -> None:
    rules = Budgeting(Settings(max_visual_tokens_per_request=400))
    rules.check_total(400, budget_at)
    with pytest.raises(RequestError, match=r"keeps 1152 .* allows 400 .* fit at retention 0\.348"):
        rules.check_total(1152, lambda retention: 2 * budget_at(retention))
    with pytest.raises(RequestError, match="send fewer images"):
        rules.check_total(500, lambda retention: 500)


@pytest.mark.parametrize("limit", [1, 63, 64, 200, 575, 576])
def test_the_largest_retention_that_fits_is_found(limit: int) -> None:
    found = largest_retention(limit, budget_at)
    assert found is not None
    assert budget_at(found) <= limit
    assert found == 1.0 or budget_at(round(found + 0.001, 3)) > limit


@pytest.mark.parametrize(("kept", "expected"), [(0, 0.695), (300, 0.174), (176, 0.389)])
def test_what_the_server_decides_about_fits_a_request(kept: int, expected: float) -> None:
    rules = Budgeting(Settings(max_visual_tokens_per_request=400, min_retention=0.111))
    ceiling = rules.ceiling(kept, budget_at)
    assert ceiling == expected
    rules.check_total(kept + budget_at(ceiling), budget_at)


def test_the_servers_decisions_are_not_limited_without_need_nor_below_its_floor() -> None:
    assert Budgeting(Settings()).ceiling(0, budget_at) == 1.0
    rules = Budgeting(Settings(max_visual_tokens_per_request=400, min_retention=0.222))
    assert rules.ceiling(0, lambda retention: 400) == 1.0
    assert rules.ceiling(390, budget_at) == 0.222  # refused: it keeps too much


def test_a_plain_item_keeps_as_many_placeholders_as_its_budget() -> None:
    content = PromptUpdateDetails.from_seq([PAD] * 4)
    assert shortened(content, 0) is content
    assert shortened(content, 3).full == [PAD] * 3


def test_text_around_an_item_stays_text() -> None:
    content = PromptUpdateDetails.select_token_id([1, *[PAD] * 4, 2], PAD)
    assert shortened(content, 0) is content
    pruned = shortened(content, 3)
    assert pruned.full == [1, PAD, PAD, PAD, 2]
    assert pruned.is_embed is not None
    assert pruned.is_embed(pruned.full).tolist() == [False, True, True, True, False]


def test_text_between_tokens_gets_its_embeddings_with_them() -> None:
    content = PromptUpdateDetails.select_token_id([1, PAD, PAD, 2, 3, PAD, PAD, 4], PAD)
    pruned = shortened(content, 3, carries_text=True)
    assert sorted(pruned.full) == sorted([1, 2, 3, 4, PAD, PAD, PAD])
    assert pruned.is_embed is None

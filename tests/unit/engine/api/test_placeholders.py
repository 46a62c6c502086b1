"""Placeholders of pruned items."""

from __future__ import annotations

from vllm.multimodal.processing import PromptUpdateDetails

from msdg_vllm.engine.api.placeholders import shortened

PAD = 8


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

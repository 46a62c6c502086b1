"""A second question about an image, against an engine that has never seen it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.engine.generation import Generated, Request, generate_one_by_one
from tests.engine.probes import encoder_images


def images_encoded(llm: Any) -> int:
    """How many images the encoder of an engine has run on."""
    counts = llm.apply_model(encoder_images)
    assert len(set(counts)) == 1
    return int(counts[0])


def forget(llm: Any) -> None:
    """Make an engine one that has seen nothing."""
    llm.llm_engine.reset_encoder_cache()
    llm.reset_mm_cache()
    assert llm.reset_prefix_cache()


def assert_encoded_once(llm: Any, first: Request, others: Sequence[Request]) -> list[Generated]:
    """Fail unless questions after the first need no encoder, and get what a cold engine says."""
    forget(llm)
    generate_one_by_one(llm, [first])
    before = images_encoded(llm)
    answers = generate_one_by_one(llm, others)
    assert images_encoded(llm) == before
    for request, answer in zip(others, answers, strict=True):
        forget(llm)
        before = images_encoded(llm)
        (cold,) = generate_one_by_one(llm, [request])
        assert images_encoded(llm) > before
        assert answer == cold
    return answers

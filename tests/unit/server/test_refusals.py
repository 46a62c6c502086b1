"""Whose mistake an error of shape is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.serve.engine.serving import BaseServing

from server.refusals import _comes_from_protocol


def test_a_part_whose_type_is_null_is_the_clients_mistake() -> None:
    part = {"type": None, "image_url": {"url": "data:,"}}
    request: Any = SimpleNamespace(messages=[{"role": "user", "content": [part]}])
    with pytest.raises(AttributeError) as raised:
        BaseServing._get_message_types(SimpleNamespace(), request)  # type: ignore[arg-type]
    assert _comes_from_protocol(raised.value)


def test_a_fault_of_ours_is_not_the_clients() -> None:
    with pytest.raises(AttributeError) as raised:
        None.split  # type: ignore[attr-defined]  # noqa: B018
    assert not _comes_from_protocol(raised.value)

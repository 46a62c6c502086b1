"""How far the positions of a pruned prompt reach."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from msdg_vllm.core.errors import RequestError
from msdg_vllm.engine.api.position_limit import Span, check_positions, table_size


def test_a_table_has_four_times_the_positions_that_a_checkpoint_names() -> None:
    rope = {"rope_type": "default"}
    assert table_size(SimpleNamespace(max_position_embeddings=512, rope_parameters=rope)) == 2048
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert table_size(SimpleNamespace(max_position_embeddings=1024, rope_parameters=yarn)) == 4096


def test_an_answer_as_long_as_the_model_allows_counts() -> None:
    # 10 tokens of text, an image of 300 positions in 3 tokens: everything behind is 297 further.
    spans = [Span(offset=10, length=3, extent=300)]
    check_positions(spans, max_model_len=512, limit=512 + 297)
    with pytest.raises(RequestError, match=r"reach 809 .*max-model-len 512.*up to 808\."):
        check_positions(spans, max_model_len=512, limit=512 + 296)


def test_a_position_in_the_middle_counts_even_when_a_later_item_takes_fewer() -> None:
    pruned, whole = Span(offset=0, length=1, extent=900), Span(offset=1, length=800, extent=40)
    with pytest.raises(RequestError, match="reach 940"):
        check_positions([whole, pruned], max_model_len=600, limit=899)


def test_a_prompt_within_the_table_passes() -> None:
    check_positions([], max_model_len=512, limit=512)

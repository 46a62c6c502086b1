"""Extra memory stays linear in the number of tokens."""

import pytest
import torch

from benchmarks.selection.peak_memory import PeakMemory
from msdg_vllm.core import ImageSignals, analyze_image, select_tokens
from tests.unit.core.cases import make_profile

WIDTH, LLM_WIDTH = 64, 96


def peak_bytes(num_rows: int, num_tokens: int) -> tuple[int, int]:
    """The most extra bytes alive at once in analysis and in selection."""
    profile = make_profile(num_groups=20)
    states = {n: torch.randn(num_rows, num_tokens, WIDTH) for n in profile.layers}
    visual = torch.randn(num_rows, num_tokens, LLM_WIDTH)
    query = torch.randn(16, LLM_WIDTH)
    with PeakMemory(states) as analysis:
        signals: ImageSignals = analyze_image(states, profile)
    with PeakMemory(visual, query, [signals.groups, signals.saliency]) as selection:
        select_tokens(signals, visual, query, num_tokens // 9)
    return analysis.peak, selection.peak


@pytest.mark.parametrize("num_rows", [1, 3])
def test_twice_the_tokens_take_twice_the_memory(num_rows: int) -> None:
    small, large = peak_bytes(num_rows, 1440), peak_bytes(num_rows, 2880)
    for before, after in zip(small, large, strict=True):
        assert after <= 2.05 * before


def test_nothing_is_as_large_as_tokens_by_tokens() -> None:
    analysis, selection = peak_bytes(1, 2880)
    square = 2880 * 2880 * 4
    assert analysis < square / 10
    assert selection < square / 10


def test_analysis_takes_less_memory_than_the_states_it_reads() -> None:
    analysis, _ = peak_bytes(2, 576)
    assert analysis < 2 * 576 * WIDTH * 4 * 5


def test_the_measure_sees_what_is_alive_at_once() -> None:
    with PeakMemory() as memory:
        a = torch.ones(1000)
        del a
        b = torch.ones(1000)
        c = b.view(10, 100) + 1
    assert memory.peak == 8000
    assert c.shape == (10, 100)

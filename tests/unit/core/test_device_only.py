"""Nothing in analysis and selection makes a device wait for the host."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from msdg_vllm.core import SelectionOptions, analyze_image, select_tokens
from msdg_vllm.core.options import PAPER
from tests.unit.core.cases import make_profile
from tests.unit.core.waiting import NoWaiting

PROFILE = make_profile(num_groups=5)
VARIANTS = [
    PAPER,
    SelectionOptions(grouping="output", saliency="accumulated", sink_filter=False),
    SelectionOptions(budgets="size", rank_by="random"),
    SelectionOptions(grouping="none", allocate_by="relevance", rank_by="saliency"),
]


def make_inputs(device: str) -> tuple[dict[int, Tensor], Tensor, Tensor, Tensor]:
    """A batch of two images of 21 tokens for `PROFILE` and its ablations."""
    states = {n: torch.randn(2, 84, 8, device=device) for n in PROFILE.layers}
    valid = torch.ones(2, 21, dtype=torch.bool, device=device)
    return states, torch.randn(2, 21, 12, device=device), torch.randn(3, 12, device=device), valid


def run(
    states: dict[int, Tensor],
    visual: Tensor,
    query: Tensor,
    valid: Tensor,
    options: SelectionOptions,
) -> Tensor:
    """Analysis and selection in one."""
    signals = analyze_image(states, PROFILE, 4, valid=valid, options=options)
    return select_tokens(signals, visual, query, 6, options)


@pytest.mark.usefixtures("_rows_together")
@pytest.mark.parametrize("options", VARIANTS)
def test_no_operator_waits_for_the_device(options: SelectionOptions) -> None:
    inputs = make_inputs("cpu")
    with NoWaiting() as mode:
        run(*inputs, options)
    assert "sort" in mode.seen


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.where(x > 0),
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: x.clone().__setitem__(x > 0, torch.ones(int((x > 0).sum().item()))),
        lambda x: torch.repeat_interleave(x.flatten(), torch.ones(6, dtype=torch.int64)),
        lambda x: x.to("meta"),
    ],
)
def test_the_guard_notices_what_it_is_for(waits: Callable[[Tensor], object]) -> None:
    with pytest.raises(AssertionError), NoWaiting():
        waits(torch.ones(2, 3))


@pytest.mark.parametrize("options", VARIANTS)
def test_shapes_follow_without_any_data(options: SelectionOptions) -> None:
    # A meta tensor has no values: reading one, or branching on one, raises an error.
    assert run(*make_inputs("meta"), options).shape == (2, 6)


@pytest.mark.usefixtures("_rows_together")
def test_both_halves_trace_without_a_graph_break() -> None:
    states, visual, query, valid = make_inputs("cpu")
    signals = analyze_image(states, PROFILE, 4, valid=valid)
    expected = select_tokens(signals, visual, query, 6)
    analyze = torch.compile(analyze_image, fullgraph=True, backend="eager")
    select = torch.compile(select_tokens, fullgraph=True, backend="eager")
    traced = analyze(states, PROFILE, 4, valid=valid)
    assert torch.equal(traced.groups, signals.groups)
    assert torch.equal(select(traced, visual, query, 6), expected)


def test_both_halves_export_as_one_graph() -> None:
    class Both(torch.nn.Module):
        def forward(
            self, states: dict[int, Tensor], visual: Tensor, query: Tensor, valid: Tensor
        ) -> Tensor:
            return run(states, visual, query, valid, PAPER)

    inputs = make_inputs("cpu")
    program = torch.export.export(Both(), inputs)
    others = make_inputs("cpu")
    assert torch.equal(program.module()(*others), run(*others, PAPER))

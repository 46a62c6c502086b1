"""Nothing in analysis and selection makes a device wait for the host."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from msdg_vllm.core import SelectionOptions, analyze_image, select_tokens
from msdg_vllm.core.options import PAPER
from tests.unit.core.cases import make_profile

PROFILE = make_profile(num_groups=5)
VARIANTS = [
    PAPER,
    SelectionOptions(grouping="output", saliency="accumulated", sink_filter=False),
    SelectionOptions(budgets="size", rank_by="random"),
    SelectionOptions(grouping="none", allocate_by="relevance", rank_by="saliency"),
]

# Operators whose result, or whose shape, the host must read from the device.
WAITING = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_numpy",
    "argwhere", "masked_select", "masked_scatter", "unique", "unique_dim", "unique_consecutive",
    "_unique", "_unique2", "bincount", "histc", "repeat_interleave", "one_hot", "tolist",
}  # fmt: skip
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class NoWaiting(TorchDispatchMode):
    """Fails on an operator that would make a GPU wait, or that moves data off its device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket.__name__
        self.seen.add(packet)
        assert packet not in WAITING or func is torch.ops.aten.repeat_interleave.self_int, func
        assert torch.Tag.data_dependent_output not in func.tags, func
        assert torch.Tag.dynamic_output_shape not in func.tags or packet in INDEXING, func
        if packet in INDEXING:
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            assert not masks, f"{func} by a mask has a shape that the data decides"
        if packet in ("_to_copy", "copy_"):
            assert kwargs.get("device") in (None, args[0].device), f"{func} changes the device"
        return func(*args, **kwargs)


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

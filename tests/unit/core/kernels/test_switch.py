"""One switch decides between kernels and torch, and a kernel that fails costs no request."""

import logging
import subprocess
import sys

import pytest
import torch

from msdg_vllm.core import analyze_image, kernels, select_tokens
from tests.unit.core.cases import random_case


@pytest.fixture
def _kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for kernels on a CPU, for which Triton has no compiler here."""
    monkeypatch.setattr(kernels, "DEVICES", {"cpu"})
    monkeypatch.setattr(kernels, "_failed", set())


def test_the_core_imports_triton_only_when_a_kernel_runs() -> None:
    code = (
        "import sys, torch, msdg_vllm.core as core, msdg_vllm.methods; "
        "print('triton' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_a_cpu_uses_torch() -> None:
    assert not kernels.run_on(torch.device("cpu"))
    assert kernels.run_on(torch.device("cuda"))


@pytest.mark.usefixtures("_kernels_on_cpu")
def test_a_kernel_that_does_not_compile_falls_back_to_torch_with_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = random_case(23)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            signals = analyze_image(case.states, case.profile, valid=case.valid)
            keep = select_tokens(signals, case.visual, case.query, case.budget)
    (record,) = caplog.records
    assert "without its Triton kernels" in record.getMessage()
    assert not kernels.run_on(torch.device("cpu"))
    monkeypatch.setattr(kernels, "DEVICES", set())
    expected = analyze_image(case.states, case.profile, valid=case.valid)
    assert torch.equal(signals.groups, expected.groups)
    assert keep.tolist() == case.solve().keep


@pytest.mark.usefixtures("_kernels_on_cpu")
def test_a_device_without_memory_is_no_reason_to_give_up_its_kernels() -> None:
    def fails() -> None:
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        kernels.run(torch.device("cpu"), fails)
    assert kernels.run_on(torch.device("cpu"))


def test_kernels_get_one_type_one_stride_and_aligned_rows() -> None:
    wide = torch.randn(3, 9, 8)
    assert [row.data_ptr() for row in kernels.readable(wide.unbind())] == [
        row.data_ptr() for row in wide
    ]
    for rows in (
        [wide[0], wide[1].bfloat16()],
        [wide[0].double(), wide[1].double()],
        [wide[0], wide[1].T.contiguous().T],
        [wide[0].flatten()[1:65].view(8, 8), wide[1, :8]],
    ):
        found = kernels.readable(rows)
        for row, expected in zip(found, rows, strict=True):
            assert torch.equal(row, expected.to(row.dtype))
            assert row.data_ptr() % 16 == 0
        assert len({(row.dtype, row.stride()) for row in found}) == 1
        assert found[0].dtype == torch.float32

"""Every kernel becomes machine code for the GPUs in use, and fits them."""

import pytest

from benchmarks.selection.launches import SHAPES, recorded
from tests.unit.core.kernels.cubins import Resources, Variant, compile_for, variant_of

CAPABILITIES = {80: "A100", 90: "H100", 100: "B200"}
# So that two programs or more fit on a multiprocessor: it has 65,536 registers and, on the
# smallest of the three, 164 KiB of shared memory.
MAX_REGISTERS = 32_768
MAX_SHARED_BYTES = 48 * 1024
# A few bytes of stack cost nothing; a real spill is in the thousands.
MAX_SPILLED_BYTES = 64
KERNELS = {
    "activation_kernel", "saliency_kernel", "direction_kernel", "candidate_kernel",
    "gram_kernel", "seed_kernel", "iterate_kernel", "finish_kernel",
    "start_kernel", "farthest_kernel", "assign_kernel", "update_kernel",
    "relevance_kernel", "budget_kernel", "rank_kernel", "keep_kernel",
    "determinant_kernel", "large_farthest_kernel", "large_determinant_kernel",
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Variant, int], Resources]:
    """What every variant that the shapes in use need takes on every GPU, compiled afresh."""
    variants = {
        variant_of(launch): None
        for method in ("msdg", "divprune", "cdpruner", "cen_divprune", "cen_cdpruner")
        for shape in SHAPES
        for launch in recorded(method, shape).kernels
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        return {
            (variant, capability): compile_for(variant, capability)
            for variant in variants
            for capability in CAPABILITIES
        }


def test_every_kernel_compiles_for_every_gpu(
    compiled: dict[tuple[Variant, int], Resources],
) -> None:
    assert {variant.kernel.fn.__name__ for variant, _ in compiled} == KERNELS
    assert len(compiled) % len(CAPABILITIES) == 0


def test_registers_shared_memory_and_spills_are_bounded(
    compiled: dict[tuple[Variant, int], Resources],
) -> None:
    too_much = []
    for (variant, capability), taken in sorted(compiled.items(), key=lambda item: str(item[0])):
        print(f"sm_{capability} {variant.name}: {taken}")
        if (
            taken.registers * 32 * variant.num_warps > MAX_REGISTERS
            or taken.shared_bytes > MAX_SHARED_BYTES
            or taken.spilled_bytes > MAX_SPILLED_BYTES
        ):
            too_much.append((capability, variant.name, taken))
    assert too_much == []

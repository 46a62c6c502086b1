"""A micro-batch takes a handful of launches, whatever is in it."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.selection.launches import MICRO_BATCH, SHAPES, Shape, count, recorded
from benchmarks.selection.roofline import DEVICES, estimated_seconds, load_of

GREEDY = ("divprune", "cdpruner", "cen_divprune", "cen_cdpruner")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_analysis_and_selection_take_few_launches(shape: Shape) -> None:
    analysis, selection = count("msdg", shape)
    limit = 24 if shape.num_tokens <= 1024 else 64
    assert analysis.num_launches + selection.num_launches <= limit
    assert selection.num_launches <= 8


@pytest.mark.parametrize("num_tokens", [576, 1024, 4096])
def test_neither_images_nor_questions_change_the_number(num_tokens: int) -> None:
    one = replace(MICRO_BATCH, num_images=1, num_questions=1, num_tokens=num_tokens)
    expected = [half.num_launches for half in count("msdg", one)]
    for num_images, num_questions in ((3, 1), (8, 8), (40, 5)):
        shape = replace(one, num_images=num_images, num_questions=num_questions)
        assert [half.num_launches for half in count("msdg", shape)] == expected


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_states_are_read_once_by_each_kernel_that_needs_them(shape: Shape) -> None:
    state = 2 * shape.num_images * shape.num_tokens * shape.patches_per_token * shape.width
    for launch in recorded("msdg", shape).kernels:
        num_read = {"activation_kernel": 1, "saliency_kernel": 2, "direction_kernel": 2}.get(
            launch.kernel.fn.__name__
        )
        if num_read is not None:
            moved = load_of(launch, shape).num_bytes
            assert num_read <= moved / state < num_read + 2.1  # directions are written in float32


@pytest.mark.parametrize(
    ("shape", "milliseconds"), [*((shape, 1.0) for shape in SHAPES[:3]), (SHAPES[4], 2.0)], ids=str
)
def test_an_a100_is_estimated_to_take_no_longer_than(shape: Shape, milliseconds: float) -> None:
    seconds = estimated_seconds(recorded("msdg", shape), shape, DEVICES[0])
    assert seconds <= milliseconds / 1000


@pytest.mark.parametrize("method", ["msdg", *GREEDY])
@pytest.mark.parametrize("num_tokens", [1089, 4096])
def test_nothing_is_as_large_as_tokens_by_tokens_beyond_1024(method: str, num_tokens: int) -> None:
    shape = Shape(1, num_tokens)
    made = [
        argument.numel()
        for launch in recorded(method, shape).kernels
        for argument in launch.arguments
        if isinstance(argument, torch.Tensor)
    ]
    # Filled up to whole tiles, the directions are the largest, or the tokens at unit length.
    width = shape.width if method == "msdg" else shape.llm_width
    assert max(made) < num_tokens * width * 1.1


@pytest.mark.parametrize("method", GREEDY)
@pytest.mark.parametrize("num_tokens", [576, 1089, 4096])
def test_a_greedy_loop_is_one_launch(method: str, num_tokens: int) -> None:
    work = recorded(method, Shape(1, num_tokens))
    assert len(work.kernels) == 1
    # Before the loop cosines to the nearest neighbour are found 512 tokens at a time.
    assert work.num_launches < 110 + 8 * num_tokens // 512


def test_operators_that_launch_are_counted_and_views_are_not() -> None:
    from benchmarks.selection.launches import _counted

    x = torch.empty(4, 6, dtype=torch.bfloat16, device="meta")
    with _counted() as work:
        x.view(6, 4).T[1:].unbind()
        torch.empty_like(x)
    assert work.num_launches == 0
    with _counted() as work:
        y = x.float() @ torch.empty(6, 3, device="meta")
        y.add_(1).clamp_max_(2)
        torch.ones(2).to("meta")
    assert [operator.name for operator in work.operators] == [
        "_to_copy", "mm", "add_", "clamp_max_", "_to_copy",
    ]  # fmt: skip
    assert work.operators[1].num_flops == 2 * 4 * 6 * 3
    assert work.operators[0].num_bytes == 4 * 6 * (2 + 4)


def test_the_benchmark_ends_with_the_launches_of_a_micro_batch() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.selection", "--launches"],
        capture_output=True,
        text=True,
        check=True,
    )
    last = run.stdout.strip().splitlines()[-1]
    found = re.fullmatch(r"launches: analysis (\d+), selection (\d+)", last)
    assert found is not None, last
    analysis, selection = map(int, found.groups())
    assert (analysis, selection) == tuple(half.num_launches for half in count("msdg", MICRO_BATCH))
    assert "not measured on a GPU" in run.stdout

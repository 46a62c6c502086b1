"""The table of launches and estimates, by method and shape."""

from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from benchmarks.selection.launches import MICRO_BATCH, SHAPES, Shape, Work, count
from benchmarks.selection.roofline import (
    ASSUMPTIONS,
    DEVICES,
    encoder_seconds,
    estimated_seconds,
    num_bytes,
)
from msdg_vllm.methods import METHODS, Method, method_named

# Counted and estimated for one image, then multiplied: images follow one another.
_WAITS = "waits for the device in the middle, which nothing without data can show"


@dataclass(frozen=True)
class LaunchCost:
    """What a method makes a device do for a shape; times are estimates."""

    method: str
    shape: str
    analysis_launches: int
    selection_launches: int
    moved_mib: float
    estimated_ms: dict[str, float]  # by device
    estimated_share: dict[str, float]  # of the encoder


def launch_costs() -> list[LaunchCost | str]:
    """Count every method on every shape; a line instead for a method that cannot be counted."""
    costs: list[LaunchCost | str] = []
    for name in METHODS:
        try:
            costs += [_cost(name, shape) for shape in SHAPES]
        except NotImplementedError:
            costs.append(f"{name}: {_WAITS}")
    return costs


def _cost(name: str, shape: Shape) -> LaunchCost:
    is_one_by_one = type(method_named(name)).select_all is Method.select_all
    counted = replace(shape, num_images=1, num_questions=1) if is_one_by_one else shape
    times = shape.num_images if is_one_by_one else 1
    analysis, selection = _count(name, counted)
    both = Work(analysis.operators + selection.operators, analysis.kernels + selection.kernels)
    seconds = {d.name: times * estimated_seconds(both, counted, d) for d in DEVICES}
    return LaunchCost(
        method=name,
        shape=str(shape),
        analysis_launches=times * analysis.num_launches,
        selection_launches=times * selection.num_launches,
        moved_mib=times * num_bytes(both, counted) / 2**20,
        estimated_ms={device: 1e3 * value for device, value in seconds.items()},
        estimated_share={d.name: seconds[d.name] / encoder_seconds(shape, d) for d in DEVICES},
    )


_count = cache(count)


def launch_table(costs: list[LaunchCost | str]) -> str:
    """The costs as a Markdown table, with what the estimates assume."""
    devices = [device.name for device in DEVICES]
    lines = [
        "Launches are counted. Times and shares of the encoder are estimates, "
        "not measured on a GPU.",
        f"They assume {ASSUMPTIONS}.",
        "",
        "| method | images x tokens | launches: analysis | selection | read and written |"
        + "".join(f" {name}, estimate | of its encoder |" for name in devices),
        "|---|---|---|---|---|" + "---|---|" * len(devices),
    ]
    for cost in costs:
        if isinstance(cost, str):
            continue
        lines.append(
            f"| {cost.method} | {cost.shape} | {cost.analysis_launches} | "
            f"{cost.selection_launches} | {cost.moved_mib:.0f} MiB |"
            + "".join(
                f" {cost.estimated_ms[name]:.2f} ms | {cost.estimated_share[name]:.1%} |"
                for name in devices
            )
        )
    return "\n".join([*lines, "", *(cost for cost in costs if isinstance(cost, str))])


def micro_batch_line() -> str:
    """The launches of MSDG-Prune on eight images with eight questions."""
    analysis, selection = (half.num_launches for half in count("msdg", MICRO_BATCH))
    return f"launches: analysis {analysis}, selection {selection}"


def as_json(costs: list[LaunchCost | str]) -> list[dict[str, Any]]:
    """The costs that could be counted, as data."""
    return [asdict(cost) for cost in costs if isinstance(cost, LaunchCost)]

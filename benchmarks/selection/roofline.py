"""An estimate of how long a device would take, from what is moved and computed. Nothing is timed.

A launch takes the longest of: moving its bytes at the memory's rate; computing on all
multiprocessors; and one program after the other on those that are busy, each with the rates of one
multiprocessor and a wait for every step that needs the one before. Launches follow one another,
and so do the rounds of a launch whose programs meet.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from benchmarks.selection.launches import Operator, Shape, Work
from msdg_vllm.core.kernels import Launch

ASSUMPTIONS = (
    "5 us for a launch; half of the peak rate of float32 arithmetic, as our products are; 80% of "
    "the memory's rate; 64 bytes per clock and multiprocessor from the L2 cache; 1 us for a step "
    "of a loop that waits for the one before, 3 us for a meeting of all programs, after which all "
    "is read from memory again; two programs per multiprocessor; the encoder in bfloat16 at half "
    "of the peak rate"
)
LAUNCH_SECONDS, STEP_SECONDS, MEETING_SECONDS = 5e-6, 1e-6, 3e-6
PROGRAMS_PER_MULTIPROCESSOR = 2
MEMORY_SHARE, COMPUTE_SHARE = 0.8, 0.5


@dataclass(frozen=True)
class Device:
    """Rates of a GPU from its data sheet."""

    name: str
    num_multiprocessors: int
    float32_flops: float
    bfloat16_flops: float
    bytes_per_second: float
    clock: float


DEVICES = (
    Device("A100", 108, 19.5e12, 312e12, 2.04e12, 1.41e9),
    Device("H100", 132, 67e12, 989e12, 3.35e12, 1.75e9),
)


@dataclass(frozen=True)
class Load:
    """What a launch of ours moves and computes.

    Attributes:
        num_bytes: Read from memory or written to it, once.
        num_programs: Programs that do work.
        program_bytes: What one program reads and writes.
        program_flops: What one program computes.
        program_steps: Steps of one program that wait for the one before.
        num_rounds: How often all of this is done; programs meet between rounds.
    """

    num_bytes: int
    num_programs: int
    program_bytes: float
    program_flops: float = 0.0
    program_steps: float = 1.0
    num_rounds: int = 1


def load_of(launch: Launch, shape: Shape) -> Load:
    """Return what a launch moves and computes for images of a shape."""
    names = launch.kernel.arg_names
    given: dict[str, Any] = dict(zip(names, launch.arguments, strict=False)) | launch.constants
    name = launch.kernel.fn.__name__
    tensors = {id(v): v for v in launch.arguments if isinstance(v, Tensor)}.values()
    programs = prod(launch.grid)
    own_bytes = sum(tensor.nbytes for tensor in tensors)
    own_bytes += _BEHIND_ADDRESSES[name](shape) if name in _BEHIND_ADDRESSES else 0
    program_bytes, flops, steps = _PER_PROGRAM.get(name, _streaming)(given, shape)
    rounds = given["num_steps"] if name in _MEETING else 1
    return Load(own_bytes, programs, program_bytes or own_bytes / programs, flops, steps, rounds)


# What kernels read by address is no argument of theirs.
_BEHIND_ADDRESSES: dict[str, Callable[[Shape], int]] = {
    "relevance_kernel": lambda s: 2 * s.num_images * s.num_tokens * s.llm_width,
    "budget_kernel": lambda s: 8 * s.num_images * s.num_tokens,
    "rank_kernel": lambda s: 13 * s.num_images * s.num_tokens,
}

# Kernels whose programs meet after each step.
_MEETING = {"large_farthest_kernel", "large_determinant_kernel"}

PerProgram = tuple[float, float, float]


def _streaming(given: dict[str, Any], shape: Shape) -> PerProgram:
    return 0.0, 0.0, 2.0  # an address, then the data behind it


def _gram(given: dict[str, Any], shape: Shape) -> PerProgram:
    tile, width = given["TILE"], given["padded_width"]
    # Half of the programs have nothing to do.
    return 2 * 4 * tile * width / 2, 2 * tile * tile * width / 2, 2


def _seed(given: dict[str, Any], shape: Shape) -> PerProgram:
    # A step reads a row, then finds the smallest value of all threads.
    return 8 * given["padded_tokens"] * given["max_groups"], 0, 2 * given["max_groups"]


def _iterate(given: dict[str, Any], shape: Shape) -> PerProgram:
    tokens, groups, columns = given["padded_tokens"], given["GROUPS"], given["COLUMNS"]
    return 4 * tokens * (columns + groups + 4), 2 * groups * tokens * columns, 4


def _farthest(given: dict[str, Any], shape: Shape) -> PerProgram:
    if "padded_width" not in given:  # DivPrune's: a row and a smallest value for each step
        steps = given["num_steps"]
        return 4.0 * given["stride"] * steps, 0, 2.0 * steps
    rows = given["TILE"] + 1
    return 4 * rows * given["padded_width"], 2 * rows * given["padded_width"], 4


def _assign(given: dict[str, Any], shape: Shape) -> PerProgram:
    tile, groups, width = given["TILE"], given["GROUPS"], given["padded_width"]
    return 4 * (tile + groups) * width, 2 * tile * groups * width, 4


def _update(given: dict[str, Any], shape: Shape) -> PerProgram:
    tokens, groups, columns = given["padded_tokens"], given["GROUPS"], given["COLUMNS"]
    return tokens * (4 * columns + 8), 2 * groups * tokens * columns, 4


def _relevance(given: dict[str, Any], shape: Shape) -> PerProgram:
    passes = -(-(shape.num_query_tokens + shape.num_questions - 1) // given["QUERIES"])
    tokens, queries, width = given["TOKENS"], given["QUERIES"], given["width"]
    return passes * 2 * (tokens + queries) * width, passes * 2 * tokens * queries * width, 3


def _budgets(given: dict[str, Any], shape: Shape) -> PerProgram:
    spans = -(-shape.num_tokens // given["SPAN"])
    return 12 * shape.num_tokens, 4 * given["GROUPS"] * shape.num_tokens, 12 + spans


def _ranks(given: dict[str, Any], shape: Shape) -> PerProgram:
    return 17 * shape.num_tokens, 6 * given["OWN"] * shape.num_tokens, 3


def _determinant(given: dict[str, Any], shape: Shape) -> PerProgram:
    steps, stride = given["num_steps"], given["stride"]
    # A step reads the rows of all steps before it.
    return 8.0 * stride * steps * steps / 2, 1.0 * stride * steps * steps, 4.0 * steps


def _large_greedy(given: dict[str, Any], shape: Shape) -> PerProgram:
    units = given["units"]
    # Half as fast in float64. Own tokens, the smallest of them, then those of all programs.
    flops = 2 * units.numel() * units.element_size() / 4
    return 0.0, flops / given["PROGRAMS"], 3


_PER_PROGRAM: dict[str, Callable[[dict[str, Any], Shape], PerProgram]] = {
    "gram_kernel": _gram,
    "seed_kernel": _seed,
    "iterate_kernel": _iterate,
    "farthest_kernel": _farthest,
    "assign_kernel": _assign,
    "update_kernel": _update,
    "relevance_kernel": _relevance,
    "budget_kernel": _budgets,
    "rank_kernel": _ranks,
    "determinant_kernel": _determinant,
    "large_farthest_kernel": _large_greedy,
    "large_determinant_kernel": _large_greedy,
}


def estimated_seconds(work: Work, shape: Shape, device: Device) -> float:
    """Estimate how long a device takes for what a method makes it do."""
    operators = sum(_operator_seconds(operator, device) for operator in work.operators)
    return operators + sum(_kernel_seconds(load_of(one, shape), device) for one in work.kernels)


def _operator_seconds(operator: Operator, device: Device) -> float:
    moving = operator.num_bytes / (device.bytes_per_second * MEMORY_SHARE)
    computing = operator.num_flops / (device.float32_flops * COMPUTE_SHARE)
    return LAUNCH_SECONDS + max(moving, computing)


def _kernel_seconds(load: Load, device: Device) -> float:
    moving = load.num_bytes / (device.bytes_per_second * MEMORY_SHARE)
    each = device.num_multiprocessors
    together = min(PROGRAMS_PER_MULTIPROCESSOR, -(-load.num_programs // each))
    rounds = -(-load.num_programs // (each * together))
    program = together * max(
        load.program_bytes / (64 * device.clock),
        load.program_flops / (device.float32_flops / each * COMPUTE_SHARE),
    )
    once = max(moving, rounds * program + load.program_steps * STEP_SECONDS)
    return LAUNCH_SECONDS + load.num_rounds * once + (load.num_rounds - 1) * MEETING_SECONDS


def encoder_seconds(shape: Shape, device: Device) -> float:
    """Estimate how long the encoder of a shape takes: CLIP-ViT-L or Qwen2.5-VL's, as LLaVA and
    Qwen run them.
    """
    patches, width = shape.num_tokens * shape.patches_per_token, shape.width
    if shape.patches_per_token == 1:
        layers, mlp, attention = 23, 8 * width * width, 23 * 4 * patches**2 * width
        per_patch = 8 * width * width + 2 * mlp
    else:
        # A gated MLP of width 3,420; four layers attend to all patches, 28 to windows of 64.
        layers, mlp = 32, 3 * width * 3420
        attention = 4 * 4 * patches**2 * width + 28 * 4 * patches * 64 * width
        per_patch = 8 * width * width + 2 * mlp
    flops = shape.num_images * (layers * patches * per_patch + attention)
    return flops / (device.bfloat16_flops * COMPUTE_SHARE)


def num_bytes(work: Work, shape: Shape) -> int:
    """Return what a method reads from memory and writes to it."""
    moved = sum(operator.num_bytes for operator in work.operators)
    loads = [load_of(launch, shape) for launch in work.kernels]
    return moved + sum(load.num_bytes * load.num_rounds for load in loads)

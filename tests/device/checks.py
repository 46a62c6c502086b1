"""What is run, what each check shows, and what it needs."""

import ast
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.device.machine import Machine

SERVING_RESULTS = "check-gpu-serving.json"
ENGINE_TESTS = Path(__file__).parents[1] / "engine"


def _pytest(*words: str) -> Callable[[Machine], list[str]]:
    # What engines write is not captured: pytest would keep the waits of a test that passed.
    options = ("-q", "-s", "-p", "no:cacheprovider")
    return lambda _: [sys.executable, "-m", "pytest", *options, *words]


@dataclass(frozen=True)
class Check:
    """One process, and what it takes to run it."""

    name: str
    shows: str
    command: Callable[[Machine], list[str]]
    minutes: float = 30
    num_gpus: int = 0
    num_cores: int = 1
    needs_model: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    def lacks(self, machine: Machine) -> str | None:
        """Say why the check cannot run on a machine; None if it can."""
        if machine.num_gpus < self.num_gpus:
            return f"needs {self.num_gpus} GPU, and there is {machine.num_gpus or 'none'}"
        # Two ranks take two GPUs, or two cores where there is no GPU at all.
        if not machine.num_gpus and machine.num_cores < self.num_cores:
            return f"needs {self.num_cores} cores, and there are {machine.num_cores}"
        if machine.num_gpus and machine.num_gpus < self.num_cores:
            return f"needs {self.num_cores} GPUs, and there is {machine.num_gpus}"
        if self.needs_model and not machine.has_model:
            return f"the weights of {machine.model} are not at hand; name others with --model"
        return None


def _of_engine() -> list[Check]:
    """One check for each file of engine tests; its first line says what it shows."""
    return [
        Check(
            path.stem.removeprefix("test_"),
            (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0],
            _pytest(f"tests/engine/{path.name}", "-k", "not tensor_parallel"),
        )
        for path in sorted(ENGINE_TESTS.glob("test_*.py"))
    ]


def _serving(machine: Machine) -> list[str]:
    words = ["run", "--model", machine.model, "--rounds", "5", "--results", SERVING_RESULTS]
    # Both servers share the first GPU.
    words += ["--", "--gpu-memory-utilization", "0.4"]
    return [sys.executable, "-m", "benchmarks.serving", *words]


CHECKS = (
    Check(
        "kernels",
        "the Triton kernels on the device choose what the torch code chooses on the CPU, those "
        "whose programs wait for each other among them",
        lambda _: [sys.executable, "-m", "tests.device.kernels"],
        minutes=10,
        num_gpus=1,
    ),
    *_of_engine(),
    Check(
        "tensor_parallel",
        "two ranks answer as one",
        _pytest("tests/engine", "-k", "tensor_parallel"),
        num_cores=2,
    ),
    Check(
        "serving",
        "throughput and time to first token beside stock vLLM, on a public model",
        _serving,
        minutes=60,
        needs_model=True,
        # Without a GPU both would take a share of the whole machine's memory.
        environment={"VLLM_CPU_KVCACHE_SPACE": "2"},
    ),
)

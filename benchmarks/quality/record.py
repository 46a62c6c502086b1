"""Provenance: what must be known to take a number again."""

import hashlib
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.shared.provenance import ROOT, commit, processor_name, versions


def provenance(model: Path, program: str = "benchmarks.quality") -> dict[str, Any]:
    """Return the command that runs, commit, date, machine, versions and the model's weights."""
    return {
        "command": shlex.join(["python", "-m", program, *sys.argv[1:]]),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "processor": processor_name(),
        "versions": versions(),
        "model": {"name": model.resolve().name, "weights_sha256": weights_hash(model)},
    }


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

"""A machine with neither compiler nor libnuma nor caches, as far as a process can tell."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

# What vLLM and the shell's own tools call; no compiler, and nothing that finds one elsewhere.
TOOLS = ("sh", "bash", "env", "lscpu", "uname", "base64", "tr", "cat", "curl", "make", "git")


def bare_environment(folder: Path) -> dict[str, str]:
    """Return the variables that make a machine look bare to the processes that get them."""
    tools, libraries, home = (folder / name for name in ("bin", "lib", "home"))
    for part in (tools, libraries, home):
        part.mkdir(parents=True)
    for name in TOOLS:
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    # The loader stops at the first file of that name, and this one is no library.
    (libraries / "libnuma.so.1").touch()
    caches = {
        name: str(home / name.lower())
        for name in ("XDG_CACHE_HOME", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "HF_HOME")
    }
    path = {"PATH": str(tools), "CXX": "g++", "LD_LIBRARY_PATH": str(libraries)}
    temporary = {"TMPDIR": os.environ.get("TMPDIR", "/tmp")}
    return {**path, **caches, **temporary, "HOME": str(home)}

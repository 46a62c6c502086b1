"""Fit the start to this machine: no compiler, little free memory, a model too small to care.

Only where vLLM runs on a CPU, and only what the operator left open.
"""

from __future__ import annotations

import argparse
import atexit
import os
import shutil
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from msdg_vllm.core.errors import SettingsError

GIB = 1024**3
SMALL_MODEL_BYTES = GIB // 4
"""Below this, compiling takes longer than it saves, and any KV cache holds many chats."""
SMALL_MODEL_KV_BYTES = GIB

_KV_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"


_DECIDED = ("enforce_eager", "compilation_config", "gpu_memory_utilization")


def unsaid() -> argparse.Namespace:
    """Return a namespace to parse into: an option decided here stays None if nobody gave it."""
    return argparse.Namespace(**dict.fromkeys(_DECIDED))


def fit_machine(
    options: argparse.Namespace,
    parser: argparse.ArgumentParser,
    environment: MutableMapping[str, str] = os.environ,
) -> None:
    """Decide what the operator left open in `options`: compilation and memory."""
    from vllm.platforms import current_platform

    model = options.model_tag or options.model
    if current_platform.is_cpu():
        preload_past_spaces(environment)
        weights = weight_bytes(model)
        small = weights is not None and weights < SMALL_MODEL_BYTES
        _decide_compilation(options, small, has_compiler(environment))
        _decide_memory(options, small, environment)
        if small:
            options.use_tqdm_on_load = False  # a bar for what takes no time
    for name in _DECIDED:
        if getattr(options, name) is None:
            setattr(options, name, parser.get_default(name))


def preload_past_spaces(environment: MutableMapping[str, str]) -> None:
    """Name torch's OpenMP library by a path without spaces, at which LD_PRELOAD would be split.

    vLLM preloads the library in its processes, unless the variable names one already.
    """
    import torch

    library = next(Path(torch.__file__).parent.glob("lib/libgomp*.so*"), None)
    if library is None or " " not in str(library) or "gomp" in environment.get("LD_PRELOAD", ""):
        return
    folder = Path(tempfile.mkdtemp(prefix="msdg-vllm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    link = folder / library.name
    link.symlink_to(library)
    environment["LD_PRELOAD"] = ":".join(filter(None, [environment.get("LD_PRELOAD"), str(link)]))


def has_compiler(environment: Mapping[str, str] = os.environ) -> bool:
    """Say whether torch will find the C++ compiler that it compiles models with on a CPU."""
    compiler = environment.get("CXX", "g++")
    return shutil.which(compiler, path=environment.get("PATH")) is not None


def weight_bytes(model: str) -> int | None:
    """Return the size of the weights in a local folder; None where there are none to see."""
    folder = Path(model)
    files = [*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("*.pt")]
    return sum(file.stat().st_size for file in files) if files else None


def _decide_compilation(options: argparse.Namespace, small: bool, compiler: bool) -> None:
    if options.enforce_eager is None and options.compilation_config is None:
        options.enforce_eager = small or not compiler
    if not options.enforce_eager and not compiler:
        raise SettingsError(
            "compiling the model takes a C++ compiler, and neither $CXX nor g++ was found; "
            "install one (on Debian and Ubuntu: apt install g++), or pass --enforce-eager"
        )


def _decide_memory(
    options: argparse.Namespace, small: bool, environment: Mapping[str, str]
) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.cpu_resource_utils import get_memory_node_info, get_visible_memory_node

    given = (options.kv_cache_memory_bytes, options.gpu_memory_utilization)
    if environment.get(_KV_VARIABLE) or any(value is not None for value in given):
        return
    memory = get_memory_node_info(get_visible_memory_node()[0])
    workers = (
        options.tensor_parallel_size * options.pipeline_parallel_size * options.data_parallel_size
    )
    if small:
        share = memory.available_memory // (4 * workers)
        options.kv_cache_memory_bytes = min(SMALL_MODEL_KV_BYTES, share)
    elif workers == 1:
        # vLLM takes a share of all memory, and gives up where other programs have some of it.
        free = 0.9 * memory.available_memory / memory.total_memory
        options.gpu_memory_utilization = min(EngineArgs.gpu_memory_utilization, free)

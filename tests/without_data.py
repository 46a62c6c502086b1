"""Real models of every family on a device whose tensors have no data.

PyTorch's `meta` device knows shapes and nothing else. Whatever would read a value off the device,
or needs one to know a shape, fails there, as surely as it would make a GPU wait.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from msdg_vllm.engine.spec import PruningSpec
from tests.engine.generation import ENVIRONMENT

DEVICE = torch.device("meta")


class NoBlockingCopies(TorchDispatchMode):
    """Fails on a copy between host and device that the host waits for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "_to_copy" and (device := kwargs.get("device")) is not None:
            assert torch.device(device) == args[0].device or kwargs.get("non_blocking"), func
        if name == "copy_" and args[0].device != args[1].device:
            assert kwargs.get("non_blocking") or (len(args) > 2 and args[2]), func
        if name in ("index", "index_put", "index_put_") and args[0].device == DEVICE:
            assert all(i is None or i.device == DEVICE for i in args[1]), f"{func} by host indices"
        return func(*args, **kwargs)


def build(folder: Path, **options: Any) -> Any:
    """A checkpoint's model, with parameters that have shapes and no values."""
    os.environ.update(ENVIRONMENT)
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
        model_parallel_is_initialized,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.plugins import load_general_plugins
    from vllm.utils.torch_utils import set_default_torch_dtype

    load_general_plugins()
    options = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 512, **options}
    config = EngineArgs(str(folder), **options).create_engine_config()
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            rendezvous = Path(tempfile.mkdtemp()) / "rendezvous"
            init_distributed_environment(1, 0, f"file://{rendezvous}", 0, backend="gloo")
            ensure_model_parallel_initialized(1, 1)
        dtype: Any = config.model_config.dtype
        with DEVICE, set_default_torch_dtype(dtype):
            model: Any = initialize_model(config)
    linears: list[Any] = [m for m in model.modules() if isinstance(m, LinearBase)]
    for module in linears:
        module.cpu_linear = F.linear  # what loading weights would have set
    # There is no clock on this device either.
    model.statistics.measure_selection = lambda *_, **__: nullcontext()
    return model


def embed(model: Any, kwargs: dict[str, Any], specs: list[PruningSpec]) -> list[torch.Tensor]:
    """What the worker does with images: on the device but for what stays on the host."""
    with torch.inference_mode(), NoBlockingCopies():
        rows: list[torch.Tensor] = model.embed_multimodal(
            **kwargs, msdg_image_spec=[spec.to_tensor() for spec in specs]
        )
    return rows

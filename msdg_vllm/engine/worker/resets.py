"""Images are forgotten when vLLM's runners drop what they hold of encoders.

Runners do so on `reset_encoder_cache` and `reset_mm_cache`, before they sleep, and when weights are
reloaded in place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

_RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
_WORKERS = ("vllm.v1.worker.gpu_worker",)


def install() -> None:
    """Wrap the runners and workers that this process has loaded; again changes nothing."""
    for names, owner, method, forget in (
        (_RUNNERS, "GPUModelRunner", "reset_encoder_cache", _forget_all),
        (_RUNNERS, "GPUModelRunner", "reset_mm_cache", _forget_images),
        # A trainer's new weights need not pass `load_weights`.
        (_WORKERS, "Worker", "finish_weight_update", _forget_all),
    ):
        for module in filter(None, map(sys.modules.get, names)):
            holder = getattr(module, owner)
            stock = getattr(holder, method)
            if not hasattr(stock, "__wrapped__"):
                setattr(holder, method, _forgetting(stock, forget))


def _forgetting(stock: Callable[..., Any], forget: Callable[[Any], None]) -> Callable[..., Any]:
    @wraps(stock)
    def reset(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        forget(self.get_model())
        return result

    return reset


def _forget_all(model: Any) -> None:
    from msdg_vllm.engine.worker.model import PruningModel  # installs this module

    if isinstance(model, PruningModel):
        model.forget_images()


def _forget_images(model: Any) -> None:
    """Only what media left: blocks of the KV cache survive, with the tokens that were kept."""
    from msdg_vllm.engine.worker.model import PruningModel

    if isinstance(model, PruningModel):
        model.store.clear()

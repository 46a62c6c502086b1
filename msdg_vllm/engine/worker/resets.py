"""Images are forgotten when vLLM's runners drop what they hold of encoders.

Runners do so on `reset_encoder_cache` and `reset_mm_cache`, before they sleep, and when weights are
reloaded in place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msdg_vllm.engine.hooks import wrap

if TYPE_CHECKING:
    from msdg_vllm.engine.worker.model import PruningModel

_RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
_WORKERS = ("vllm.v1.worker.gpu_worker",)


def install() -> None:
    """Wrap the runners and workers that this process has loaded; again changes nothing."""
    for names, owner, method, reset in (
        (_RUNNERS, "GPUModelRunner", "reset_encoder_cache", _forget_all),
        (_RUNNERS, "GPUModelRunner", "reset_mm_cache", _forget_images),
        # A trainer's new weights need not pass `load_weights`.
        (_WORKERS, "Worker", "finish_weight_update", _forget_all),
    ):
        for module in filter(None, map(sys.modules.get, names)):
            wrap(getattr(module, owner), method, reset)


def _forget_all(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    result = stock(self, *args, **kwargs)
    if (model := _pruned_model(self)) is not None:
        model.forget_images()
    return result


def _forget_images(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Only what media left: blocks of the KV cache survive, with the tokens that were kept."""
    result = stock(self, *args, **kwargs)
    if (model := _pruned_model(self)) is not None:
        model.store.clear()
    return result


def _pruned_model(holder: Any) -> PruningModel | None:
    from msdg_vllm.engine.worker.model import PruningModel  # installs this module

    model = holder.get_model()
    return model if isinstance(model, PruningModel) else None

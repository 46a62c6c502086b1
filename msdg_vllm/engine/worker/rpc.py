"""Methods that API server processes call in the workers.

Installed on vLLM's worker class by `msdg_vllm.register()`, which runs in every process, so that
the user's own `--worker-extension-cls` stays free.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.worker_base import WorkerBase

from msdg_vllm.engine.worker.model import PruningModel


def msdg_statistics(worker: WorkerBase) -> dict[str, Any] | None:
    """Return what this worker counted; None if its model cannot be pruned.

    The server asks every few seconds, so that expired explanations do not stay for want of the
    next one.
    """
    model = worker.get_model()
    if not isinstance(model, PruningModel):
        return None
    model.explanations.drop_expired()
    return {**model.statistics.snapshot(), **model.store.snapshot()}


def msdg_explanation(
    worker: WorkerBase, key: int, with_pictures: bool
) -> list[dict[str, Any]] | None:
    """Return what this worker decided for an explained request; None if it does not know."""
    model = worker.get_model()
    if not isinstance(model, PruningModel):
        return None
    return model.explanations.get(key, with_pictures=with_pictures)


def install() -> None:
    """Make the functions above callable through `collective_rpc`."""
    for method in (msdg_statistics, msdg_explanation):
        setattr(WorkerBase, method.__name__, method)

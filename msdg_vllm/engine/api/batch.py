"""Pruning for `run_batch`, which serves a file of requests through vLLM's handlers.

Fills a gap: it builds the handlers of a server, but loads no endpoint plugins, so that our half of
them would be missing and `retention` ignored.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import Any

from msdg_vllm.engine.hooks import wrap

_MODULE = "vllm.entrypoints.launchers.run_batch"


def install() -> None:
    """Hand our endpoint plugin to a running `run_batch`; again, or elsewhere, changes nothing."""
    main: Any = sys.modules["__main__"]
    is_main = getattr(main.__spec__, "name", "") == _MODULE
    if (module := main if is_main else sys.modules.get(_MODULE)) is not None:
        wrap(module, "init_app_state", _init_with_plugin)


async def _init_with_plugin(
    stock: Any, engine_client: Any, state: Any, *args: Any, **kwargs: Any
) -> None:
    (plugin,) = entry_points(group="vllm.endpoint_plugins", name="msdg")
    state.endpoint_plugins = [plugin.load()()]
    await stock(engine_client, state, *args, **kwargs)

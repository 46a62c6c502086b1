"""Pruning for `run_batch`, which serves a file of requests through vLLM's handlers.

Fills a gap: it builds the handlers of a server, but loads no endpoint plugins, so that our half of
them would be missing and `retention` ignored.
"""

from __future__ import annotations

import sys
from functools import wraps
from importlib.metadata import entry_points
from typing import Any

_MODULE = "vllm.entrypoints.launchers.run_batch"


def install() -> None:
    """Hand our endpoint plugin to a running `run_batch`; again, or elsewhere, changes nothing."""
    main: Any = sys.modules["__main__"]
    is_main = getattr(main.__spec__, "name", "") == _MODULE
    module: Any = main if is_main else sys.modules.get(_MODULE)
    if module is None or hasattr(module.init_app_state, "__wrapped__"):
        return
    module.init_app_state = _with_plugin(module.init_app_state)


def _with_plugin(init_app_state: Any) -> Any:
    @wraps(init_app_state)
    async def init(engine_client: Any, state: Any, *args: Any, **kwargs: Any) -> None:
        (plugin,) = entry_points(group="vllm.endpoint_plugins", name="msdg")
        state.endpoint_plugins = [plugin.load()()]
        await init_app_state(engine_client, state, *args, **kwargs)

    return init

"""What every pruned model shares: the only package that knows vLLM's internals.

`api` runs in the API process, `worker` in the workers; `spec` is what crosses between them.
"""

import sys
from importlib.abc import MetaPathFinder

_MOVED = {
    "attention": "worker.attention",
    "choosing": "worker.selection",
    "compat": "hooks",
    "embedding": "worker.model",
    "explanations": "worker.explanations",
    "positions": "worker.positions",
    "processor": "api.processor",
    "queries": "api.queries",
    "renderer": "api.renderer",
    "signals": "worker.capture",
    "states": "worker.capture",
    "statistics": "worker.statistics",
    "tiles": "worker.selection",
}


class _MovedModules(MetaPathFinder):
    """Names the new place of a module that an import or an entry point has by its old name."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        package, _, name = fullname.rpartition(".")
        if package == __name__ and name in _MOVED:
            raise ModuleNotFoundError(
                f"{fullname} is now {package}.{_MOVED[name]}; correct the import or the entry "
                "point that names it",
                name=fullname,
            )


sys.meta_path.append(_MovedModules())

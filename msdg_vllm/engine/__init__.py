"""What every pruned model shares: the only package that knows vLLM's internals.

`api` runs in the API process, `worker` in the workers; `spec` is what crosses between them.
"""

import sys
from importlib.abc import MetaPathFinder

_MOVED = {
    "compat": "hooks",
    "embedding": "worker.model",
    **{name: f"api.{name}" for name in ("processor", "queries", "renderer")},
    **{
        name: f"worker.{name}"
        for name in ("attention", "explanations", "positions", "signals", "states", "statistics")
    },
    "tiles": "layout",
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

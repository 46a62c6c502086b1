"""Let torch's companions be imported next to a CPU build of torch when they were built for CUDA.

The main Python index has no CPU builds of torchvision, torchaudio and torchcodec, which vLLM
requires. The wheels installed in their place cannot load their compiled libraries, and importing
them fails in ways that neither transformers nor vLLM expects. Nothing here uses those libraries,
so it is enough that the imports end as they do where a library is merely absent:

    torchvision  dies with `operator torchvision::nms does not exist` while it attaches shape
                 functions to two operators; declaring the two lets it be imported.
    torchaudio   raises OSError; told that there is no library, it goes on without.
    torchcodec   raises OSError, where vLLM is prepared for ImportError.

vLLM's own CPU kernels cannot be loaded where libnuma is absent; `numa_stand_in` takes its place.

What can load its libraries is left alone.

vLLM runs models in several processes, and transformers imports these packages before any plugin
is loaded. Python therefore calls `install()` at every interpreter start, through
`msdg-vllm-torch-companions.pth`, which `make setup` brings; where the wheel was installed instead,
`python -m msdg_vllm.torch_companions` writes it. It must stay cheap, so this module imports nothing
that a bare interpreter has not loaded already.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # importing `typing` would double the start-up time of every interpreter
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from torch.library import Library

# torchvision imports this right after it tried to load its compiled operators.
_TORCHVISION = "torchvision._meta_registrations"
_TORCHVISION_SCHEMAS = {
    name: f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    for name in ("nms", "qnms")
}
# The module that defines how torchaudio loads a library.
_TORCHAUDIO = "torchaudio._extension.utils"
_TORCHCODEC = "torchcodec"
# One of them is loaded, by what the processor can do.
_VLLM_KERNELS = ("vllm._C", "vllm._C_AVX2", "vllm._C_AVX512")

# A left-over file, after this package has gone, must be silent.
_START_UP_LINE = (
    'import sys; exec("try:\\n    from msdg_vllm.torch_companions import install\\n    install()'
    '\\nexcept ImportError:\\n    pass")\n'
)

# A torch library takes its operators with it when it is garbage collected.
_library: Library | None = None


def declare_missing_operators() -> list[str]:
    """Declare the operators that torchvision could not load, and return their names."""
    global _library
    import torch

    missing = [name for name in _TORCHVISION_SCHEMAS if not hasattr(torch.ops.torchvision, name)]
    if missing:
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for name in missing:
            _library.define(_TORCHVISION_SCHEMAS[name])
    return missing


class _CompanionFinder:
    """Finds what Python's own finder finds, and minds how a companion's import ends."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname == _TORCHVISION:
            declare_missing_operators()
        elif fullname == _TORCHAUDIO:
            return _find_with(_execute_torchaudio, fullname, path)
        elif fullname == _TORCHCODEC:
            return _find_with(_execute_torchcodec, fullname, path)
        elif fullname in _VLLM_KERNELS:
            from msdg_vllm.numa_stand_in import load_if_missing

            load_if_missing()
        return None


def _find_with(
    execute: Callable[[Callable[[ModuleType], None], ModuleType], None],
    fullname: str,
    path: Sequence[str] | None,
) -> ModuleSpec | None:
    """Find a module whose code `execute` will run, given what would have run it."""
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec(fullname, path)
    if spec is not None and spec.loader is not None:
        stock = spec.loader.exec_module
        spec.loader.exec_module = lambda module: execute(stock, module)  # type: ignore[method-assign]
    return spec


def _execute_torchaudio(stock: Callable[[ModuleType], None], module: ModuleType) -> None:
    stock(module)
    load_library = module._load_lib

    def load_library_if_possible(name: str) -> bool:
        try:
            return bool(load_library(name))
        except OSError:
            return False  # torchaudio's own answer where the library is absent

    module._load_lib = load_library_if_possible  # type: ignore[attr-defined]


def _execute_torchcodec(stock: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        stock(module)
    except OSError as error:
        raise ImportError(
            f"torchcodec does not fit this torch: {error}", name=_TORCHCODEC
        ) from error


def install() -> None:
    """Watch for the companions' imports; calling it again changes nothing."""
    if not any(isinstance(finder, _CompanionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _CompanionFinder())


def write_start_up_file() -> str:
    """Write the file that has Python call `install()` in this environment; return its path."""
    import sysconfig

    path = f"{sysconfig.get_path('purelib')}/msdg-vllm-torch-companions.pth"
    with open(path, "w", encoding="utf-8") as file:
        file.write(_START_UP_LINE)
    return path


if __name__ == "__main__":
    print(write_start_up_file())

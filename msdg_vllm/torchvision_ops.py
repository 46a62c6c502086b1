"""Let a torchvision that was built for CUDA be imported next to a CPU build of torch.

The main Python index has no CPU build of torchvision. The wheel installed in its place cannot
load its compiled operators, and its own import then dies with `operator torchvision::nms does
not exist`, taking transformers and vLLM with it. Nothing here uses those operators: torchvision
only attaches shape functions to two of them while it is imported, so declaring the two is enough.

vLLM runs models in several processes, and transformers imports torchvision before any plugin is
loaded. Python therefore calls `install()` at every interpreter start, through
`msdg-vllm-torchvision.pth`. It must stay cheap, so this module imports nothing that a bare
interpreter has not loaded already.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # importing `typing` would double the start-up time of every interpreter
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from torch.library import Library

_SCHEMAS = {
    name: f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    for name in ("nms", "qnms")
}

# torchvision imports this right after it tried to load its compiled operators.
_FIRST_USER_OF_THE_OPERATORS = "torchvision._meta_registrations"

# A torch library takes its operators with it when it is garbage collected.
_library: Library | None = None


def declare_missing_operators() -> list[str]:
    """Declare the operators that torchvision could not load, and return their names.

    With a torchvision whose compiled operators did load, nothing is declared.
    """
    global _library
    import torch

    missing = [name for name in _SCHEMAS if not hasattr(torch.ops.torchvision, name)]
    if missing:
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for name in missing:
            _library.define(_SCHEMAS[name])
    return missing


class _OperatorFinder:
    """Finds no module: it only notices that torchvision's operators are about to be used."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname == _FIRST_USER_OF_THE_OPERATORS:
            sys.meta_path.remove(self)
            declare_missing_operators()
        return None


def install() -> None:
    """Watch for torchvision's import; calling it again changes nothing."""
    if not any(isinstance(finder, _OperatorFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OperatorFinder())

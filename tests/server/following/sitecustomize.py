"""Python imports this file at the start of a process whose path has this folder.

While a request is followed it notes which functions of ours run, and whether they are handed what
stands for the request's retention. It is in the functions themselves, put there as their modules
are imported, so that no process runs slower before and after.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
import time
from collections.abc import Mapping
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

FOLDER = Path(os.environ["MSDG_TEST_FOLLOWING"])
PACKAGES = ("msdg_vllm", "server")
# A retention, from the body to the count of rows.
TYPES = {"PruningFields", "PruningRequest", "PruningSpec", "Question"}
NAMES = {"retention", "budget", "budgets"}
CARRIERS = ("mm_processor_kwargs", "hf_processor_mm_kwargs")
MAX_DEPTH = 3


def note(path: str, function: str, arguments: Mapping[str, Any]) -> None:
    """Write down one call, while a request is followed."""
    if (FOLDER / "now").exists():
        is_told = any(name in NAMES or stands_for(value) for name, value in arguments.items())
        with (FOLDER / f"{os.getpid()}.calls").open("a") as file:
            file.write(json.dumps([time.monotonic(), path, function, is_told]) + "\n")


def stands_for(value: object, depth: int = 0) -> bool:
    """Whether a value is a form of a request's retention, or holds one."""
    if TYPES & {kind.__name__ for kind in type(value).__mro__}:
        return True
    for name in CARRIERS:
        value = getattr(value, name, None) or value
    if depth == MAX_DEPTH:
        return False
    if isinstance(value, Mapping):
        if NAMES & {*value} or any(str(key).endswith("_spec") for key in value):
            return True
        value = list(value.values())
    is_collection = isinstance(value, list | tuple | frozenset)
    return is_collection and any(stands_for(one, depth + 1) for one in value)  # type: ignore[attr-defined]


class Noting(ast.NodeTransformer):
    """Puts a note at the start of each function of a module."""

    def __init__(self, path: str) -> None:
        self.path = path

    def visit_FunctionDef(self, node: Any) -> Any:
        self.generic_visit(node)
        (call,) = ast.parse(f"__note__({self.path!r}, {node.name!r}, locals())").body
        node.body.insert(ast.get_docstring(node) is not None, call)
        return node

    visit_AsyncFunctionDef = visit_FunctionDef


class Loader(SourceFileLoader):
    """Compiles a module of ours with its notes; nothing is kept in a cache."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = Noting(path).visit(ast.parse(self.get_data(path)))
        code: CodeType = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
        return code


class Finder:
    """Finds our modules before Python does."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in PACKAGES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


builtins.__note__ = note  # type: ignore[attr-defined]
sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]

"""The files that a build of the images may copy: the checkout without what .dockerignore names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class _Rule:
    ignores: bool
    text: str

    def names(self, path: PurePosixPath) -> bool:
        """Say whether the rule is about the path, or about a folder around it."""
        parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
        pieces = re.split(r"(\*\*/|\*\*|\*|\?)", self.text)
        pattern = re.compile("".join(parts.get(piece) or re.escape(piece) for piece in pieces))
        return any(pattern.fullmatch(str(around)) for around in (path, *path.parents))


def context_files(root: Path) -> Iterator[PurePosixPath]:
    """Yield the files below `root` that Docker would send to its builder."""
    rules = list(_rules(root / ".dockerignore"))
    for folder, folders, files in os.walk(root):
        here = PurePosixPath(Path(folder).relative_to(root))
        folders[:] = sorted(name for name in folders if not _is_closed(here / name, rules))
        yield from (here / name for name in sorted(files) if not _is_ignored(here / name, rules))


def _rules(path: Path) -> Iterator[_Rule]:
    for line in path.read_text().splitlines():
        pattern = line.strip()
        if pattern and not pattern.startswith("#"):
            yield _Rule(not pattern.startswith("!"), pattern.removeprefix("!").strip("/"))


def _is_ignored(path: PurePosixPath, rules: list[_Rule]) -> bool:
    ignored = False
    for rule in rules:  # the last one that names the path decides
        if rule.names(path):
            ignored = rule.ignores
    return ignored


def _is_closed(folder: PurePosixPath, rules: list[_Rule]) -> bool:
    """Say whether nothing in an ignored folder is asked for after all: no need to look inside."""
    inside = (not rule.ignores and rule.text.startswith(f"{folder}/") for rule in rules)
    return _is_ignored(folder, rules) and not any(inside)

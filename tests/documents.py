"""The documents of the repository, and the code in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# CHANGELOG.md also speaks of what is no more.
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "models/*/README.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"
)

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_CONTINUED = re.compile(r"\\\n\s*")
_INDENTED = re.compile(r"^    (\S.*)$", re.MULTILINE)


def blocks(path: Path, *languages: str) -> list[str]:
    """Return the fenced blocks of a document that are of one of the languages."""
    return [text for language, text in _BLOCK.findall(path.read_text()) if language in languages]


def commands(path: Path) -> Iterator[str]:
    """Yield the lines of a document that a reader may type: in shell blocks, indented, in ticks."""
    for block in blocks(path, "bash", "sh", "console"):
        yield from _CONTINUED.sub(" ", block).splitlines()
    prose = _CONTINUED.sub(" ", _BLOCK.sub("", path.read_text()))
    yield from _INDENTED.findall(prose)
    yield from _INLINE.findall(prose)


def documented_metrics() -> tuple[list[str], list[str]]:
    """Return the metrics that docs/metrics.md defines: those of all servers, and of a target."""
    always, with_target = (ROOT / "docs/metrics.md").read_text().split("\nWith `--target-ttft`")
    of_text = re.compile(r"^\| `(msdg_\w+)`", re.MULTILINE)
    return of_text.findall(always), of_text.findall(with_target)

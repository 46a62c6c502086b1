"""The Dockerfile as data: its stages, and what each instruction says."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = ROOT / "Dockerfile"

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_FLAG = re.compile(r"--[a-z-]+(=\S+)?\s+")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its upper-case name, its `--flags`, and the text after them."""

    name: str
    flags: Mapping[str, str]
    text: str

    @property
    def words(self) -> list[str]:
        """The text split as a shell would, or the items of a JSON list."""
        if self.text.startswith("["):
            return [str(item) for item in json.loads(self.text)]
        return shlex.split(self.text)

    @property
    def assignments(self) -> dict[str, str]:
        """The `NAME=value` pairs of an ENV, ARG or LABEL."""
        return dict(word.split("=", 1) for word in self.words)


@dataclass(frozen=True, slots=True)
class Stage:
    """What stands between one FROM and the next."""

    name: str
    base: str
    instructions: tuple[Instruction, ...]

    def all(self, name: str) -> list[Instruction]:
        """Return every instruction of that name."""
        return [instruction for instruction in self.instructions if instruction.name == name]

    def last(self, name: str) -> Instruction:
        """Return the instruction that counts where only the last one does."""
        found = self.all(name)
        if not found:
            raise ValueError(f"stage {self.name} of the Dockerfile has no {name}")
        return found[-1]


def substitute(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$NAME` and `${NAME}`; a name that is not known becomes nothing, as in Docker."""
    return _VARIABLE.sub(lambda found: variables.get(found[1] or found[2], ""), text)


def read_stages(path: Path = DOCKERFILE) -> dict[str, Stage]:
    """Return the stages by name, in the order of the file."""
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    collected: list[Instruction] = []
    for line in _logical_lines(path.read_text()):
        instruction = _instruction(*line.split(maxsplit=1))
        if instruction.name == "FROM":
            image, _, name = instruction.words
            collected = []
            stages[name] = Stage(name, substitute(image, arguments), ())
        elif not stages:
            arguments |= instruction.assignments  # only ARG may stand before the first FROM
        else:
            collected.append(instruction)
            name = next(reversed(stages))
            stages[name] = Stage(name, stages[name].base, tuple(collected))
    return stages


def _logical_lines(text: str) -> list[str]:
    """Return the instructions, each on one line; comments may stand between parts of one."""
    lines = [line.rstrip() for line in text.splitlines() if not line.lstrip().startswith("#")]
    return [line for line in "\n".join(lines).replace("\\\n", "").splitlines() if line]


def _instruction(name: str, value: str) -> Instruction:
    flags = {}
    while match := _FLAG.match(value):
        key, _, setting = match[0].strip().removeprefix("--").partition("=")
        flags[key] = setting
        value = value[match.end() :]
    return Instruction(name.upper(), flags, value.strip())

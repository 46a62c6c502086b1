"""`python -m benchmarks.quality`: measure, render and look at what pruning costs in quality."""

import argparse
import sys
from importlib import import_module

from benchmarks.shared.client import ServerError

_COMMANDS = {
    "run": "ask a running server: accuracy of methods at several retentions",
    "ablate": "the paper's ablations, in this process",
    "render": "turn result files into tables and plots",
    "show": "draw what methods keep of some pictures, and how the encoder moves",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name in sys.argv[1:2]:
            # Only what is used is loaded: a client of the server needs neither torch nor plots.
            module = import_module(f"benchmarks.quality.{name}")
            command.description = module.__doc__
            module.add_arguments(command)
    arguments = parser.parse_args()
    try:
        output = module.main(arguments)
    except (ServerError, OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "stopped; what was answered is kept, the same command goes on\n")
    if output is not None:
        print(f"written to {output}; show it with `python -m benchmarks.quality render {output}`")


if __name__ == "__main__":
    main()

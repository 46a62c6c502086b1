"""`python -m benchmarks.quality`: measure, render and look at what pruning costs in quality."""

import argparse
import sys

from benchmarks.quality import ablate, render, run, show
from benchmarks.quality.endpoint import EndpointError

_COMMANDS = {
    "run": (run, "ask a running server: accuracy of methods at several retentions"),
    "ablate": (ablate, "the paper's ablations, in this process"),
    "render": (render, "turn result files into tables and plots"),
    "show": (show, "draw what methods keep of some pictures, and how the encoder moves"),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in _COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=text, description=module.__doc__))
    arguments = parser.parse_args()
    try:
        output = _COMMANDS[arguments.command][0].main(arguments)
    except (EndpointError, OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "stopped; the same command goes on from here\n")
    if arguments.command in ("run", "ablate"):
        print(f"written to {output}; show it with `python -m benchmarks.quality render {output}`")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

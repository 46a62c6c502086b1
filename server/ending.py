"""How a server ends: quietly when it is asked to, with its reason in one sentence when it fails."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from msdg_vllm import console


@contextmanager
def ending_quietly() -> Iterator[None]:
    """Run a server inside; leave the process when it ends.

    Libraries that vLLM loads report what they leak while the interpreter is torn down, dozens of
    lines after each Ctrl-C; nothing is left to be torn down, so the process leaves before.
    """
    code = 0
    try:
        yield
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        if noted := console.reason_of_failure():
            reason = f"the engine did not start: {noted} (--verbose shows vLLM's log)"
        else:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
        print(f"msdg-vllm serve: error: {reason}", file=sys.stderr)
        code = 1
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        code = leaving.code if isinstance(leaving.code, int) else int(bool(leaving.code))
    _leave(code)


def _leave(code: int) -> None:
    console.end_of_start()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

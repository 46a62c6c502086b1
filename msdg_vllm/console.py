"""What a person sees of vLLM's log: its warnings and errors, without those that mean nothing here.

vLLM applies the logging configuration that VLLM_LOGGING_CONFIG_PATH names in each of its processes,
so console.json reaches them all. It is used unless the operator has a wish of his own.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

CONFIGURATION = Path(__file__).with_suffix(".json")
VERBOSE = "--verbose"

_PATH_VARIABLE = "VLLM_LOGGING_CONFIG_PATH"
# Names a file that is there as long as the server is starting.
_REASON_VARIABLE = "_MSDG_REASON"

# Each is a consequence of what the launcher or vLLM itself decided, and asks for no action.
_NOISE = re.compile(
    "|".join(
        (
            r"Attempted to load weight .* with dtype",
            r"Triton is (not )?installed",
            r"Model Runner V2 requires Triton",
            r"Enforce eager set, disabling torch\.compile",
            r"Inductor compilation was disabled by user settings",
            r"CPU backend doesn't allow to use `torch\.set_num_threads`",
            r"lib(iomp|tcmalloc)\S* is not found in LD_PRELOAD",
            r"Found ulimit of \d{5,} ",
            r"Reset SSM cache type to float32",
            r"Default vLLM sampling parameters have been overridden",
            r"\[shutdown\] ",
            r"port \d+ is used by process",
        )
    )
)
PROBE_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/metrics", "/ping"})
"""Who asks here is a machine, every few seconds."""


def has_own_configuration(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Say whether the operator has configured logging: then nothing of ours is printed."""
    return any(environment.get(name) for name in (_PATH_VARIABLE, "VLLM_CONFIGURE_LOGGING")) or (
        _has_option(arguments, "--log-config-file", "--logging-config")
    )


def wants_all(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Say whether the operator wants to see vLLM's log as vLLM writes it."""
    return bool(environment.get("VLLM_LOGGING_LEVEL")) or _has_option(
        arguments, VERBOSE, "--log-level"
    )


def _has_option(arguments: Sequence[str], *names: str) -> bool:
    given = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    return any(option.startswith(names) for option in given)


def calm(environment: MutableMapping[str, str]) -> None:
    """Have every process of vLLM print what console.json lets through; before vLLM is imported."""
    environment[_PATH_VARIABLE] = str(CONFIGURATION)
    # Deprecations are for the authors of libraries; the tracker counts what an exit leaves to it.
    environment.setdefault(
        "PYTHONWARNINGS",
        "ignore::FutureWarning,ignore::UserWarning:multiprocessing.resource_tracker",
    )
    environment.setdefault("TRANSFORMERS_VERBOSITY", "error")
    file, environment[_REASON_VARIABLE] = tempfile.mkstemp(prefix="msdg-vllm-", suffix=".reason")
    os.close(file)
    prepare(environment)


def reason_of_failure() -> str | None:
    """Return what the first process that failed said last; None if none did."""
    path = Path(os.environ.get(_REASON_VARIABLE, ""))
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return lines[0] if lines else None


def end_of_start() -> None:
    """Say that the server is up, or gone: what fails from now on is shown in full."""
    if path := os.environ.get(_REASON_VARIABLE):
        Path(path).unlink(missing_ok=True)


def prepare(environment: Mapping[str, str] = os.environ) -> None:
    """Filter what vLLM says before it has configured its logging, in the process that calls."""
    if environment.get(_PATH_VARIABLE) == str(CONFIGURATION):
        logging.getLogger("vllm.triton_utils.importing").addFilter(NoiseFilter())


class NoiseFilter(logging.Filter):
    """Drops warnings that ask for no action; errors always pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR or not _NOISE.match(record.getMessage())


class ProbeFilter(logging.Filter):
    """Drops access-log lines of probes that were answered well: they come every few seconds."""

    def filter(self, record: logging.LogRecord) -> bool:
        path, status = "", 0
        if isinstance(record.args, tuple) and len(record.args) == 5:
            path, status = str(record.args[2]), int(str(record.args[4]))
        return path.partition("?")[0] not in PROBE_PATHS or status != 200


class ReasonHandler(logging.Handler):
    """Notes why a start fails, for the process that was started to say at the end."""

    def emit(self, record: logging.LogRecord) -> None:
        path = Path(os.environ.get(_REASON_VARIABLE, ""))
        if record.exc_info and record.exc_info[1] is not None and path.is_file():
            error = record.exc_info[1]
            first = (str(error).strip().splitlines() or [""])[0]
            with path.open("a") as file:
                file.write(f"{type(error).__name__}: {first}\n")


class LineFormatter(logging.Formatter):
    """Time, level, process and message; a process is named where vLLM names it."""

    def __init__(self) -> None:
        super().__init__(
            "%(asctime)s %(levelname)s (%(vllm_process_name)s) %(message)s",
            "%H:%M:%S",
            defaults={"vllm_process_name": "server"},
        )

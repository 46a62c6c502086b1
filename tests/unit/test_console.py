"""Which lines of vLLM's log a person sees, and when it is left as it is."""

from __future__ import annotations

import json
import logging
import logging.config
from pathlib import Path

import pytest

from msdg_vllm import console


def record(message: str, level: int = logging.WARNING, *args: object) -> logging.LogRecord:
    return logging.LogRecord("vllm.any", level, "file.py", 1, message, args, None)


@pytest.mark.parametrize(
    "message",
    [
        "Attempted to load weight norm.weight with dtype torch.float16 into parameter with dtype x",
        "Triton is installed, but doesn't include CPU backend. Disabling Triton.",
        "Enforce eager set, disabling torch.compile, CUDAGraphs, and JIT kernel warmup.",
        "Found ulimit of 20000 and failed to automatically increase with error",
        "[shutdown] Process manager: force killing remaining processes count=1",
    ],
)
def test_what_asks_for_no_action_is_not_shown(message: str) -> None:
    assert not console.NoiseFilter().filter(record(message))
    assert console.NoiseFilter().filter(record(message, logging.ERROR))


@pytest.mark.parametrize(
    "message",
    [
        "This server ignores `retention` and `pruning` in requests",
        "Found ulimit of 1024 and failed to automatically increase with error",
        "something that nobody has seen before",
    ],
)
def test_every_other_warning_is_shown(message: str) -> None:
    assert console.NoiseFilter().filter(record(message))


@pytest.mark.parametrize(
    ("path", "status", "shown"),
    [
        ("/v1/chat/completions", 200, True),
        ("/health", 200, False),
        ("/metrics?x=1", 200, False),
        ("/health", 503, True),
    ],
)
def test_an_access_is_shown_unless_it_is_a_healthy_probe(
    path: str, status: int, shown: bool
) -> None:
    line = record('%s - "%s %s HTTP/%s" %d', logging.INFO, "::1", "GET", path, "1.1", status)
    assert console.ProbeFilter().filter(line) is shown


@pytest.mark.parametrize(
    ("arguments", "variables", "own", "everything"),
    [
        ([], {}, False, False),
        (["--verbose"], {}, False, True),
        (["--log-level=DEBUG"], {}, False, True),
        ([], {"VLLM_LOGGING_LEVEL": "INFO"}, False, True),
        ([], {"VLLM_LOGGING_CONFIG_PATH": "mine.json"}, True, False),
        ([], {"VLLM_CONFIGURE_LOGGING": "0"}, True, False),
        (["--logging-config.formatter", "json"], {}, True, False),
        (["--log_config_file=mine.json"], {}, True, False),
    ],
)
def test_the_operators_wish_is_seen(
    arguments: list[str], variables: dict[str, str], own: bool, everything: bool
) -> None:
    assert console.has_own_configuration(arguments, variables) is own
    assert console.wants_all(arguments, variables) is everything


def test_the_first_failure_of_a_start_is_noted_and_later_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment: dict[str, str] = {}
    console.calm(environment)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert console.reason_of_failure() is None
    handler = console.ReasonHandler()
    for text in ("no room for the KV cache\nmore", "engine failed"):
        try:
            raise ValueError(text)
        except ValueError as error:
            line = record("failed", logging.ERROR)
            line.exc_info = (type(error), error, error.__traceback__)
            handler.handle(line)
    assert console.reason_of_failure() == "ValueError: no room for the KV cache"
    console.end_of_start()
    handler.handle(line)
    assert console.reason_of_failure() is None


def test_the_configuration_is_one_that_python_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM, once imported, names its process in every record; a line without a name is meant here.
    monkeypatch.setattr(logging, "_logRecordFactory", logging.LogRecord)
    configuration = json.loads(console.CONFIGURATION.read_text())
    # Under names of their own: vLLM's loggers are those of the whole session.
    configuration["loggers"] = {
        f"copy.{name}": logger for name, logger in configuration["loggers"].items()
    }
    logging.config.dictConfig(configuration)
    logging.getLogger("copy.vllm").info("not shown")
    logging.getLogger("copy.vllm").warning("shown")
    err = capsys.readouterr().err
    assert err.endswith(" WARNING (server) shown\n")
    assert "not shown" not in err


def test_the_file_is_packaged() -> None:
    assert console.CONFIGURATION.parent == Path(console.__file__).parent


def test_every_logger_of_ours_that_is_named_belongs_to_a_module() -> None:
    named = json.loads(console.CONFIGURATION.read_text())["loggers"]
    ours = [name.removeprefix("vllm.") for name in named if name.startswith("vllm.")]
    assert ours
    for name in ours:
        module = Path(console.__file__).parents[1].joinpath(*name.split("."))
        assert "logger.info(" in module.with_suffix(".py").read_text(), name

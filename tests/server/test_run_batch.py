"""`run_batch` serves a file of requests as the server does: pruned, counted, refused in place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.pictures import picture_of
from tests.server.running import ENVIRONMENT, MODEL, OPTIONS, chat_body, image_part, user


def test_a_batch_file_is_pruned_and_its_mistakes_are_refused(
    checkpoint: Path, tmp_path: Path
) -> None:
    message = user("Which colour?", image_part(picture_of("square", 1)))
    bodies = {
        "pruned": chat_body(message, retention=0.111),
        "whole": chat_body(message),
        "alias": {**chat_body(message), "model": f"{MODEL}@0.333"},
        "mistake": chat_body(message, retention="0.2"),
        "near miss": chat_body(message, retntion=0.2),
    }
    orders, answers = tmp_path / "orders.jsonl", tmp_path / "answers.jsonl"
    orders.write_text(
        "\n".join(
            json.dumps(
                {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
            )
            for name, body in bodies.items()
        )
    )
    # The module behind `vllm run-batch`, which the distribution for CPUs cannot start.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.run_batch"]
    command += ["-i", str(orders), "-o", str(answers), "--model", str(checkpoint), *OPTIONS]
    environment = {**os.environ, **ENVIRONMENT, "MSDG_RETENTION_ALIASES": "0.333"}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = {line["custom_id"]: line for line in map(json.loads, answers.read_text().splitlines())}
    for name, kept in (("pruned", 64), ("whole", 576), ("alias", 192)):
        details = found[name]["response"]["body"]["usage"]["prompt_tokens_details"]
        assert details["visual_tokens"] == kept
        assert details["visual_tokens_total"] == 576
    for name, words in (
        ("mistake", "must be a number"),
        ("near miss", "did you mean `retention`?"),
    ):
        assert found[name]["response"]["status_code"] == 400
        assert words in json.dumps(found[name]["error"])

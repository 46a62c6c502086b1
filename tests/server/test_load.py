"""Locust's traffic on the real server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from tests.server.running import ROOT, Server

KEPT = {1.0: 576, 0.333: 192, 0.111: 64, None: 576}


def test_the_load_benchmark_reports_every_retention_and_no_failure(
    server: Server, tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "locust", "-f", "benchmarks/locustfile.py", "--headless"),
            *("--host", server.url, "-u", "4", "-r", "4", "-t", "60s", "--stop-timeout", "60"),
            *("--retention", "1.0,0.333,0.111,default", "--max-conversations", "12"),
            *("--max-tokens", "4", "--only-summary"),
            *("--answers-file", str(tmp_path / "answers.json")),
            *("--json-file", str(tmp_path / "stats")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "stats.json").read_text())
    assert sum(row["num_failures"] for row in rows) == 0
    names = {"retention 1", "retention 0.333", "retention 0.111", "no retention sent"}
    for kind in ("latency", "TTFT", "TPOT"):
        assert {row["name"] for row in rows if row["method"] == kind} == names
    kept = defaultdict(set)
    for answer in json.loads((tmp_path / "answers.json").read_text()):
        kept[answer["retention"]].add(answer["visual_tokens"])
        assert 0 < answer["ttft"] <= answer["latency"]
    assert kept == {retention: {tokens} for retention, tokens in KEPT.items()}

"""The load benchmark on the real server."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from pathlib import Path

from benchmarks.load.__main__ import main
from tests.server.running import Server

KEPT = {1.0: 576, 0.333: 192, 0.111: 64, None: 576}
NAMES = {"retention 1", "retention 0.333", "retention 0.111", "no retention sent"}


def test_a_load_reports_every_retention_and_no_failure(server: Server, tmp_path: Path) -> None:
    options = ["--users", "4", "--time", "60s", "--conversations", "12"]
    mix = ["--retention", "1.0,0.333,0.111,default"]
    assert main(["run", "--host", server.url, "--folder", str(tmp_path), *options, *mix]) == 0

    rows = list(csv.DictReader((tmp_path / "stats_stats.csv").open()))
    assert {row["Failure Count"] for row in rows} == {"0"}
    for kind in ("latency", "TTFT", "TPOT"):
        assert {row["Name"] for row in rows if row["Type"] == kind} >= NAMES

    kept = defaultdict(set)
    for answer in json.loads((tmp_path / "answers.json").read_text()):
        kept[answer["retention"]].add(answer["visual_tokens"])
        assert 0 < answer["ttft"] <= answer["latency"]
    assert kept == {retention: {tokens} for retention, tokens in KEPT.items()}

    report = (tmp_path / "report.html").read_text()
    assert all(name in report for name in NAMES)
    assert (tmp_path / "locust.html").is_file()

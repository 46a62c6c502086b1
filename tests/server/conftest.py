"""One real server for nearly all tests: a start takes a minute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import make_llava
from tests.server.collector import Collector, collecting
from tests.server.running import Server, running_server


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="session")
def server(
    checkpoint: Path, collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    options = ["--retention-aliases=0.333,0.111", "--detail-low-retention=0.111", "--log-pruning"]
    options += [f"--otlp-traces-endpoint={collector.url}"]
    with running_server(checkpoint, log, *options, environment=collector.environment) as running:
        yield running

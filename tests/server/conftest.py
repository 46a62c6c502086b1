"""One real server for nearly all tests: a start takes a minute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import make_llava
from tests.server.running import Server, running_server


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    options = "--retention-aliases=0.333,0.111", "--detail-low-retention=0.111", "--log-pruning"
    with running_server(checkpoint, log, *options) as running:
        yield running

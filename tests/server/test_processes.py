"""Servers and their processes: as deploy/compose.yaml starts them, one that is followed, stock."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from PIL import Image

from benchmarks.chaos.endings import left_of, named
from benchmarks.shared.provenance import ROOT
from tests.deployment import compose_server
from tests.engine.llava_oracle import LlavaOracle
from tests.pictures import picture_of
from tests.server.command import COMMAND
from tests.server.following import environment, following
from tests.server.running import START_SECONDS, Server, chat_body, image_part, running_server, user

QUESTION = "Read the code on the sign."
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def several(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of compose.yaml, as two API processes before two data-parallel engines."""
    log = tmp_path_factory.mktemp("several") / "server.log"
    deployed = compose_server()
    options = [option for option in deployed["command"] if not option.startswith("--model=")]
    options += ["--api-server-count=2", "--data-parallel-size=2"]
    options += ["--default-retention=0.222", "--query-mode=none"]
    options += ["--default-method=cls_attention"]
    # Two engines would both be bound to the first cores.
    environment = {**deployed["environment"], "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with running_server(checkpoint, log, *options, environment=environment) as running:
        yield running


def test_the_operators_defaults_hold(several: Server) -> None:
    described = several.get("/v1/pruning").json()
    assert described["default_retention"] == 0.222
    assert described["default_method"] == "cls_attention"
    assert described["default_query_mode"] == "none"
    message = user(QUESTION, image_part(picture_of("square")))
    for fields, kept in (({}, 128), ({"retention": None}, 128), ({"retention": 1.0}, 576)):
        usage = several.post(CHAT, chat_body(message, **fields)).json()["usage"]
        assert usage["prompt_tokens_details"]["visual_tokens"] == kept


def test_the_default_method_decides_and_a_request_may_name_another(
    several: Server, checkpoint: Path
) -> None:
    picture = picture_of("square", 9)
    message = user(QUESTION, image_part(picture))
    by_default, by_wish = (
        several.post(CHAT, chat_body(message, pruning={"explain": True, **options})).json()
        for options in ({}, {"method": "msdg"})
    )
    images = [
        several.get(f"/v1/pruning/{answer['pruning']['id']}").json()["images"][0]
        for answer in (by_default, by_wish)
    ]
    oracle = LlavaOracle(checkpoint)
    assert images[0]["kept"] == oracle.keep(picture, "", 128, "cls_attention")[1]
    assert images[1]["kept"] == oracle.keep(picture, "", 128)[1]
    # The one has scores only; the other has groups and sinks too.
    assert images[0]["groups"] is images[0]["sinks"] is None
    assert len(images[0]["scores"]) == len(images[1]["scores"]) == 576
    assert len(images[1]["groups"]) == 128


def test_every_process_knows_every_explanation(several: Server) -> None:
    # Each request opens a connection, and the kernel deals connections out to the processes.
    for seed in range(6):
        message = user(QUESTION, image_part(picture_of("square", seed)))
        answer = several.post(CHAT, chat_body(message, pruning={"explain": True})).json()
        for _ in range(4):
            explanation = several.get(f"/v1/pruning/{answer['pruning']['id']}")
            assert explanation.status_code == 200
            assert len(explanation.json()["images"][0]["kept"]) == 128


def test_every_process_shows_the_same_counters(several: Server) -> None:
    names = [
        f'{name}{{model_name="tiny-llava"}}'
        for name in (
            "msdg_visual_tokens_total",
            "msdg_visual_tokens_kept_total",
            "msdg_encoder_images_total",
            "msdg_selection_seconds_count",
        )
    ]
    names.append(
        'msdg_time_to_first_token_seconds_count{model_name="tiny-llava",retention_le="0.15"}'
    )
    before = several.metrics()
    for seed in range(20, 32):
        message = user(QUESTION, image_part(picture_of("square", seed)))
        several.post(CHAT, chat_body(message, retention=0.111))
    for _ in range(6):
        after = several.metrics()
        total, kept, *counts = (after[name] - before.get(name, 0) for name in names)
        assert (total, kept) == (12 * 576, 12 * 64)
        assert counts == [12, 12, 12]


def test_both_processes_answer(several: Server) -> None:
    log = several.log.read_text(errors="replace")
    assert "ApiServer_0" in log
    assert "ApiServer_1" in log


def test_both_engines_work(several: Server) -> None:
    def ask(seed: int) -> int:
        message = user(QUESTION, image_part(picture_of("square", seed)))
        return several.post(CHAT, chat_body(message, retention=0.111)).status_code

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(40, 48))) == {200}
    finished = {
        name: value
        for name, value in several.metrics().items()
        if name.startswith("vllm:request_success_total") and value
    }
    assert all(any(f'engine="{engine}"' in name for name in finished) for engine in (0, 1))


@pytest.mark.parametrize("path", [CHAT, "/invocations", "/tokenize", "/v1/pruning", "/version"])
def test_a_stranger_is_turned_away(several: Server, path: str) -> None:
    body = chat_body(user("hi"))
    assert httpx.post(several.url + path, json=body).status_code == 401
    assert httpx.get(several.url + path).status_code == 401


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_probes_need_no_key(several: Server, path: str) -> None:
    assert httpx.get(several.url + path, timeout=60).status_code == 200


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/server_info", "/collective_rpc"])
def test_what_only_developers_need_is_not_there(several: Server, path: str) -> None:
    assert several.get(path).status_code == 404


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:9/picture.png", "none.invalid"),
        ("https://example.com/picture.png", "none.invalid"),
        ("file:///etc/hostname", "local"),
    ],
)
def test_the_server_fetches_nothing_for_its_clients(several: Server, url: str, reason: str) -> None:
    answer = several.post(CHAT, chat_body(user(QUESTION, image_part(url))))
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]


def test_a_picture_of_too_many_pixels_is_refused(several: Server) -> None:
    huge = Image.new("1", (8000, 7000))
    answer = several.post(CHAT, chat_body(user(QUESTION, image_part(huge))))
    assert answer.status_code == 400
    assert "pixels" in answer.json()["error"]["message"]


def test_a_request_of_too_many_bytes_is_refused_unread(several: Server) -> None:
    connection = http.client.HTTPConnection(several.url.removeprefix("http://"), timeout=60)
    headers = {"Content-Length": "64000001", **several.authorization}
    connection.request("POST", CHAT, headers=headers)
    assert connection.getresponse().status == 413


def test_a_request_for_very_many_answers_is_refused(several: Server) -> None:
    answer = several.post(CHAT, chat_body(user(QUESTION), n=17))
    assert answer.status_code == 400
    assert "16" in answer.json()["error"]["message"]


def test_clients_cannot_change_how_images_are_processed(several: Server) -> None:
    body = chat_body(user(QUESTION), mm_processor_kwargs={"do_resize": False})
    answer = several.post(CHAT, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "mm_processor_kwargs"


def test_stock_vllm_warns_that_it_ignores_the_fields(checkpoint: Path, tmp_path: Path) -> None:
    log = tmp_path / "stock.log"
    module = "vllm.entrypoints.openai.api_server"
    with running_server(checkpoint, log, module=module) as stock:
        assert stock.get("/v1/pruning").status_code == 404
    text = log.read_text(errors="replace")
    assert "ignores `retention` and `pruning`" in text
    assert "python -m server" in text


def test_a_wrong_option_ends_the_start_with_one_sentence(checkpoint: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "server", "--model", str(checkpoint), "--default-retention", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2
    assert "retention must be in (0, 1], got '0'" in ended.stderr.splitlines()[-1]


def test_a_start_that_fails_says_why_at_the_end(checkpoint: Path) -> None:
    ended = subprocess.run(
        [COMMAND, "serve", str(checkpoint), "--kv-cache-memory-bytes=4096", "--port=0"],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("msdg-vllm serve: error: the engine did not start: ValueError: ")
    assert "memory for the cache blocks" in last


@pytest.fixture(scope="module")
def followed(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Path]]:
    """A server as most are, and the folder from which its requests are followed."""
    folder = tmp_path_factory.mktemp("followed")
    log = folder / "server.log"
    with running_server(checkpoint, log, environment=environment(folder)) as running:
        yield running, folder


def documented_way() -> tuple[list[str], dict[str, list[str]]]:
    """The files of docs/architecture.md that a request passes: on its way in order, and beside."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.partition("## The way of a request\n")[2].partition("\n## ")[0]

    def paths(cell: str) -> list[str]:
        found = re.findall(r"`([a-z_0-9/]+\.py)`", cell)
        roots = ("server/", "msdg_vllm/")
        return [path if path.startswith(roots) else f"msdg_vllm/{path}" for path in found]

    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")]
    way = [path for row in rows if row[0].strip().isdigit() for path in paths(row[1])]
    return way, {row[0].strip(): paths(row[1]) for row in rows if len(row) == 2 and paths(row[1])}


def test_a_request_goes_the_way_that_is_documented(followed: tuple[Server, Path]) -> None:
    server, folder = followed
    body, again = (
        chat_body(user(QUESTION, image_part(picture_of("square", seed))), retention=0.111)
        for seed in (900, 901)
    )
    server.post(CHAT, body)  # what runs once in a process has run
    with following(folder) as followed_request:
        assert server.post(CHAT, {**again, "stream": True, "max_tokens": 1}).status_code == 200
    way, beside = documented_way()
    deaf, lookers, clockwork = beside.values()
    ran, told = {*followed_request.ran}, followed_request.told
    assert len(way) <= 20
    assert [path for path in told if path in way] == [path for path in way if path in told]
    assert ran - {*clockwork} == {*way, *deaf, *lookers}
    assert {*told} - {*way} == {*lookers}


def test_a_killed_worker_ends_the_server_with_an_error(followed: tuple[Server, Path]) -> None:
    doomed, _ = followed
    os.kill(named(doomed.process.pid, "Worker"), signal.SIGKILL)
    assert doomed.process.wait(60) not in (0, None)
    assert left_of(doomed.process.pid) == []

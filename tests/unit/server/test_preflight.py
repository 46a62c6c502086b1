"""What cannot work is said in one sentence before anything is loaded."""

from __future__ import annotations

import functools
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from server import preflight

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.mark.parametrize(
    "model", ["models/nope", "./nope", "/nope", "~/nope", "some folder", "a/b/c"]
)
def test_a_folder_that_is_not_there_is_named(model: str) -> None:
    with pytest.raises(ValueError, match=r"does not exist; give the path.*scenes-llava") as refused:
        preflight.check_model(model)
    assert model in str(refused.value)


@pytest.mark.parametrize(
    "model", ["models/scenes-llava", "models/scenes-qwen/", "llava-hf/llava-1.5-7b-hf", "gpt2"]
)
def test_what_is_there_and_what_the_hub_may_have_pass(model: str) -> None:
    preflight.check_model(model)


def test_a_path_with_spaces_is_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "my models"
    folder.mkdir()
    with pytest.raises(ValueError, match=r"my models is a folder without a config\.json"):
        preflight.check_model(str(folder))
    (folder / "config.json").write_text("{}")
    preflight.check_model(str(folder))


def test_a_port_in_use_is_named_with_another(taken_port: int) -> None:
    with pytest.raises(ValueError, match=f"port {taken_port} is in use.*PORT={taken_port + 1}"):
        preflight.check_port("127.0.0.1", taken_port)


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [("127.0.0.1", 70000, "does not exist"), ("192.0.2.77", 8000, "cannot listen on 192.0.2.77")],
)
def test_an_address_that_cannot_be_listened_on_is_named(host: str, port: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        preflight.check_port(host, port)


def test_a_disk_that_takes_no_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preflight.check_disk()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(ValueError, match=r"cannot write temporary files.*TMPDIR="):
        preflight.check_disk()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", functools.partial(open, "/dev/full", "wb"))
    with pytest.raises(ValueError, match="No space left on device"):
        preflight.check_disk()


def test_a_model_that_must_be_downloaded_without_a_hub_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="owner/nobody-has-this is not on this machine"):
        preflight.check_hub("owner/nobody-has-this", None)
    preflight.check_hub("models/scenes-llava", None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE forbids"):
        preflight.check_hub("owner/nobody-has-this", None)


@pytest.mark.parametrize("before", [[], ["--dtype=float32"]])
def test_the_command_ends_with_one_sentence_and_a_2_before_vllm_is_loaded(
    before: list[str], taken_port: int
) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "server", *before]
    for arguments, words in (
        (["--model", "models/nope"], "models/nope does not exist"),
        (
            ["--model=models/scenes-llava", "--host=127.0.0.1", f"--port={taken_port}"],
            f"port {taken_port} is in use",
        ),
    ):
        start = time.monotonic()
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, check=False, cwd=ROOT
        )
        said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
        assert (done.returncode, len(said)) == (2, 1)
        assert said[0].startswith(f"msdg-vllm serve: error: {words}")
        assert "| vllm\n" not in done.stderr
        assert time.monotonic() - start < 60


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--help=all", "models/nope"], ["--headless", "--model=models/nope"]]
)
def test_help_and_headless_engines_are_not_checked(arguments: list[str]) -> None:
    preflight.check_early(arguments)

"""The traffic that the locustfile makes, as an endpoint sees it that knows nothing but OpenAI."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.loopback import Handler, listening

ROOT = Path(__file__).parents[4]
OPENAI_FIELDS = {"model", "messages", "max_tokens", "temperature", "stream", "stream_options"}


class Words(Handler):
    """Streams two words, and refuses fields that are not OpenAI's."""

    bodies: ClassVar[list[dict[str, Any]]]

    def do_GET(self) -> None:
        self.answer(200, json.dumps({"data": [{"id": "some-model"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.body())
        type(self).bodies.append(body)
        if unknown := body.keys() - OPENAI_FIELDS:
            self.answer(400, json.dumps({"error": {"message": f"unknown field {unknown}"}}))
            return
        words = [{"choices": [{"delta": {"content": word}}]} for word in ("two ", "words")]
        usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in (*words, usage)]
        self.answer(200, "".join([*lines, "data: [DONE]\n\n"]))


@pytest.fixture
def endpoint() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    class RecordedWords(Words):
        bodies: ClassVar[list[dict[str, Any]]] = []

    with listening(RecordedWords) as url:
        yield url, RecordedWords.bodies


def run_locust(host: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "locust", "-f", "benchmarks/load/locustfile.py", "--headless"),
            *("--host", host, "-u", "4", "-r", "4", "-t", "60s", "--stop-timeout", "20"),
            *("--only-summary", "--answers-file", str(folder / "answers.json")),
            *("--json-file", str(folder / "stats"), *options),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_mix_it_is_plain_openai_traffic_of_many_kinds(
    endpoint: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    host, bodies = endpoint
    done = run_locust(f"{host}/v1", tmp_path, "--max-conversations=30", "--repeated-pictures=0.5")
    assert done.returncode == 0, done.stderr
    assert {body["model"] for body in bodies} == {"some-model"}
    assert all(body["stream"] for body in bodies)
    assert {(len(body["messages"]) + 1) // 2 for body in bodies} == {1, 2, 3}
    firsts = [body["messages"][0]["content"][0] for body in bodies if len(body["messages"]) == 1]
    pictures = [part["image_url"]["url"] for part in firsts]
    assert len(pictures) == 30
    assert 15 <= len(set(pictures)) < 30, "some pictures come again, others are new"
    assert len({len(url) // 10_000 for url in pictures}) >= 3, "pictures have several sizes"
    later = [body["messages"] for body in bodies if len(body["messages"]) > 1]
    assert {messages[1]["content"] for messages in later} == {"two words"}
    answers = json.loads((tmp_path / "answers.json").read_text())
    assert len(answers) == len(bodies)
    rows = {
        (row["method"], row["name"]) for row in json.loads((tmp_path / "stats.json").read_text())
    }
    name = "no retention sent"
    assert rows == {
        *((kind, name) for kind in ("latency", "TTFT", "TPOT")),
        ("TTFT", f"{name}, later turns"),
    }


def test_a_mix_is_sent_in_equal_shares_and_refusals_are_failures(
    endpoint: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    host, bodies = endpoint
    mix = ("--retention", "0.333,0.111,default", "--max-conversations", "6")
    done = run_locust(host, tmp_path, *mix)
    assert done.returncode == 1
    rows = json.loads((tmp_path / "stats.json").read_text())
    failures = {row["name"]: row["num_failures"] for row in rows if row["method"] == "latency"}
    assert failures == {"retention 0.333": 2, "retention 0.111": 2, "no retention sent": 0}
    firsts = [body.get("retention") for body in bodies if len(body["messages"]) == 1]
    assert sorted(firsts, key=str) == [0.111, 0.111, 0.333, 0.333, None, None]


def test_a_wrong_mix_ends_it_with_a_sentence(tmp_path: Path) -> None:
    done = run_locust("http://127.0.0.1:9", tmp_path, "--retention", "1.0,2")
    assert done.returncode == 2
    assert "got '2' in it; each must be in (0, 1]" in done.stderr

"""What a run beside OpenVINO GenAI asks and shows; the run itself needs its environment."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.openvino.__main__ import Case, Rival, cases, main, table
from benchmarks.openvino.rival import _for_older_transformers


def test_each_side_is_asked_whole_and_pruned() -> None:
    asked = cases(0.2)
    assert {case.retention for case in asked if case.method} == {1.0, 0.2}
    theirs = [(case.retention, case.threads) for case in asked if case.method is None]
    assert theirs == [(1.0, 1), (0.2, 1), (1.0, 2), (0.2, 2)]
    assert Case("ours, cdpruner", 0.2, "cdpruner") in asked


def test_medians_are_shown_and_decoding_apart() -> None:
    ours = [{"ttft": t, "latency": 2 * t, "prompt_tokens": 80, "decoding": 0.0} for t in (1, 2, 9)]
    theirs = [{"ttft": 0.5, "latency": 1.0, "prompt_tokens": 79, "decoding": 0.012}]
    shown = table({"samples": {"ours": ours, "theirs": theirs}})
    assert "| ours | 80 | 2.00 s | 0.25 | in TTFT |" in shown
    assert "| theirs | 79 | 0.50 s | 1.00 | 12 ms |" in shown


def test_a_rival_is_asked_for_the_share_to_drop() -> None:
    echo = (
        "import json, sys\n"
        "print('{}', flush=True)\n"
        "asked = json.loads(sys.stdin.readline())\n"
        "took = {'ttft': asked['pruning_ratio'], 'latency': 1, 'prompt_tokens': 2, 'decoding': 3}\n"
        "print(json.dumps(took), flush=True)\n"
    )
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", echo]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert Rival(process).ask(Path("picture.jpg"), 0.111).ttft == 89


def test_a_configuration_of_today_is_written_for_an_older_version(tmp_path: Path) -> None:
    rope = {"rope_theta": 1e6, "mrope_section": [8, 12, 12], "rope_type": "default"}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"rope_parameters": rope}}))
    text = _for_older_transformers("config.json", tmp_path / "config.json")
    assert text is not None
    config = json.loads(text)["text_config"]
    assert config["rope_theta"] == 1e6
    assert config["rope_scaling"]["mrope_section"] == [8, 12, 12]
    assert _for_older_transformers("model.safetensors", tmp_path / "model.safetensors") is None


def test_a_missing_environment_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["openvino", "--python", str(tmp_path / "python")])
    with pytest.raises(SystemExit):
        main()
    assert "is not there" in capsys.readouterr().err

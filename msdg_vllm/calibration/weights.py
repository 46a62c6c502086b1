"""The weights of a vision tower, out of the checkpoint of a whole model."""

import hashlib
import json
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from safetensors import safe_open
from torch import nn

from msdg_vllm.core.errors import CalibrationError

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def load_weights(tower: nn.Module, model: str) -> None:
    """Fill a tower with the weights that a checkpoint has under any prefix.

    Only the files that hold them are read.
    """
    files = _weight_files(model)
    wanted = {name.removeprefix("vision_model."): p for name, p in tower.state_dict().items()}
    probe = max(wanted, key=len)
    prefixes = sorted(
        (key.removesuffix(probe) for key in files if key.endswith(probe)),
        key=lambda prefix: sum(f"{prefix}{name}" in files for name in wanted),
    )
    prefix = prefixes[-1] if prefixes else ""
    if missing := [name for name in wanted if f"{prefix}{name}" not in files]:
        raise CalibrationError(
            f"{model}: {len(missing)} of {len(wanted)} weights of the vision tower are missing, "
            f"{missing[0]} among them; the checkpoint does not fit its configuration"
        )
    by_file: dict[str, list[str]] = {}
    for name in wanted:
        by_file.setdefault(files[f"{prefix}{name}"], []).append(name)
    for file, names in by_file.items():
        with safe_open(_fetched(model, file), "pt") as stored:
            for name in names:
                weight = stored.get_tensor(f"{prefix}{name}")
                if weight.shape != wanted[name].shape:
                    raise CalibrationError(
                        f"{model}: {name} must have the shape {tuple(wanted[name].shape)}, got "
                        f"{tuple(weight.shape)}; the checkpoint does not fit its configuration"
                    )
                wanted[name].copy_(weight)


def _weight_files(model: str) -> dict[str, str]:
    """Which file of a checkpoint holds each weight."""
    try:
        index = json.loads(Path(_fetched(model, _INDEX)).read_text(encoding="utf-8"))
        files: dict[str, str] = index["weight_map"]
        return files
    except (EntryNotFoundError, OSError):
        pass
    try:
        with safe_open(_fetched(model, _WEIGHTS), "pt") as stored:
            return dict.fromkeys(stored.keys(), _WEIGHTS)
    except (EntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise CalibrationError(f"{model} has no safetensors weights: {error}") from error


def _fetched(model: str, file: str) -> str:
    """The path of a file of a model folder, or of a model on the hub."""
    return str(Path(model) / file) if Path(model).is_dir() else hf_hub_download(model, file)


def digest(tower: nn.Module) -> str:
    """Return the SHA-256 of a tower's weights."""
    made = hashlib.sha256()
    for name, weight in sorted(tower.state_dict().items()):
        made.update(name.encode())
        made.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()

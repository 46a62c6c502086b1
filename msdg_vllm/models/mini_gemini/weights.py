"""Names of the published checkpoints' weights, and weights from the folders of the towers."""

from __future__ import annotations

from pathlib import Path

from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.utils import WeightsMapper

from msdg_vllm.models.mini_gemini.config import MGMConfig

_CLIP = "model.vision_tower.vision_tower."
_CONVNEXT_FOLDER = "convnext_folder."

# Rules apply one after the other, so the one for the language model, which fits all, is last.
WEIGHT_NAMES = WeightsMapper(
    orig_to_new_substr={"embeddings.position_ids": None},
    orig_to_new_prefix={
        # A folder with the whole CLIP has a text tower, which is not ours.
        f"{_CLIP}text_model.": None,
        f"{_CLIP}text_projection.": None,
        f"{_CLIP}visual_projection.": None,
        f"{_CLIP}logit_scale": None,
        _CLIP: "vision_tower.",
        f"{_CONVNEXT_FOLDER}visual.trunk.stem.": "vision_tower_aux.vision_stem.",
        f"{_CONVNEXT_FOLDER}visual.trunk.stages.": "vision_tower_aux.vision_stages.",
        _CONVNEXT_FOLDER: None,
        "model.vision_tower_aux.": "vision_tower_aux.",
        "model.vlm_uni_": "mining.vlm_uni_",
        "model.mm_projector.0.": "multi_modal_projector.linear_1.",
        "model.mm_projector.2.": "multi_modal_projector.linear_2.",
        "lm_head.": "language_model.lm_head.",
        "model.": "language_model.model.",
    },
)

# In order of preference; folders often hold the same weights in several formats.
_CLIP_FILES = ("model.safetensors", "pytorch_model.bin")
_CONVNEXT_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")


def folder_weights(config: MGMConfig) -> list[DefaultModelLoader.Source]:
    """Weights of the towers' own folders, where the configuration names any.

    vLLM reads them after the checkpoint, so they win.
    """
    sources = []
    for key, prefix, names in (
        ("vision_tower_folder", _CLIP, _CLIP_FILES),
        ("vision_tower_aux_folder", _CONVNEXT_FOLDER, _CONVNEXT_FILES),
    ):
        if (folder := getattr(config, key)) is not None:
            sources.append(
                DefaultModelLoader.Source(
                    folder,
                    revision=None,
                    prefix=prefix,
                    allow_patterns_overrides=[_first_file(key, folder, names)],
                )
            )
    return sources


def _first_file(key: str, folder: str, names: tuple[str, ...]) -> str:
    for name in names:
        if (Path(folder) / name).is_file():
            return name
    raise FileNotFoundError(
        f"{key} in config.json names {folder!r}, which holds none of {', '.join(names)}; "
        "correct the path, or remove the key to use the tower inside the checkpoint"
    )

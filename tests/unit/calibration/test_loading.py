"""The tower of a checkpoint, alone: the same states as the whole model's, and clear refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from benchmarks.quality.inference import load_model
from msdg_vllm.calibration import command
from msdg_vllm.calibration.loading import HuggingFaceTower, load_tower
from msdg_vllm.core.errors import CalibrationError
from tests.pictures import make_picture

MODELS = Path(__file__).parents[3] / "models"


@pytest.fixture(scope="module", params=["scenes-llava", "scenes-qwen"])
def tower(request: pytest.FixtureRequest) -> HuggingFaceTower:
    return load_tower(str(MODELS / request.param))


def test_states_are_those_of_the_whole_model(tower: HuggingFaceTower) -> None:
    picture = make_picture(200, 120, 3)
    encoded = tower.encode(picture)
    (seen,) = load_model(Path(tower.info.name)).see([picture])
    assert encoded.grid == seen.grid
    assert len(encoded.states) == tower.info.num_layers + 1
    assert encoded.valid.all()
    for ours, theirs in zip(encoded.states, seen.states, strict=False):
        assert (ours - theirs).abs().max() < 1e-3


def test_what_is_known_of_the_bundled_towers() -> None:
    llava, qwen = (load_tower(str(MODELS / name)).info for name in ("scenes-llava", "scenes-qwen"))
    # LLaVA projects the state before the last layer, which the server never runs.
    assert (llava.num_layers, llava.depth, llava.direction_end) == (11, 12, 11)
    assert (qwen.num_layers, qwen.depth, qwen.direction_end) == (12, 12, 11)
    assert (llava.patches_per_token, qwen.patches_per_token) == (1, 4)
    assert qwen.global_layers == (2, 5, 8, 11)
    assert len(llava.digest) == 64


def test_masks_take_the_way_of_the_image(tower: HuggingFaceTower) -> None:
    masks = np.zeros((4, 120, 200), bool)
    masks[0, :, :100] = True
    masks[1, :60] = True
    masks[3] = True
    encoded = tower.encode(Image.new("RGB", (200, 120)))
    areas = tower.areas(masks).reshape(4, *encoded.grid)
    rows, columns = encoded.grid
    assert areas[0, :, : columns // 2 - 1].min() > 0.95
    assert areas[0, :, columns // 2 + 1 :].max() < 0.05
    assert areas[1, : rows // 2 - 1].min() > 0.95
    assert areas[1, rows // 2 + 1 :].max() < 0.05
    assert areas[2].max() < 0.01
    assert areas[3].min() > 0.99
    view = tower.view(Image.new("RGB", (200, 120), (250, 10, 10)))
    assert view.size[0] % columns == 0
    assert np.abs(np.asarray(view).reshape(-1, 3) - np.array([250, 10, 10])).max() <= 2


def copied(tmp_path: Path, name: str = "scenes-llava") -> Path:
    folder = tmp_path / name
    shutil.copytree(MODELS / name, folder)
    return folder


def test_padding_is_left_out(tmp_path: Path) -> None:
    padded = load_tower(str(MODELS / "scenes-llava"))
    processor = padded._processor

    def pad_to_square(images: list[Image.Image], **kwargs: object) -> object:
        side = max(images[0].size)
        square = Image.new("RGB", (side, side), (122, 116, 104))
        square.paste(images[0], (0, (side - images[0].size[1]) // 2))
        return processor(images=[square], **kwargs)

    padded._processor = pad_to_square
    valid = padded.encode(make_picture(192, 96, 1)).valid.reshape(
        padded.encode(make_picture(192, 96, 1)).grid
    )
    assert valid[3:9].all()
    assert not valid[:3].any()
    assert not valid[9:].any()


def test_a_text_model_is_an_error_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CalibrationError, match=r"is no vision-language model|no vision encoder"):
        load_tower(str(tmp_path))


def edit_config(folder: Path, **vision: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["vision_config"].update(vision)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size"])
def test_a_tower_that_does_not_fit_its_configuration_is_refused(tmp_path: Path, field: str) -> None:
    folder = copied(tmp_path)
    edit_config(folder, **{field: 16 if field == "num_hidden_layers" else 256})
    with pytest.raises(CalibrationError, match="does not fit its configuration"):
        load_tower(str(folder))


def test_a_hierarchical_tower_is_refused(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    edit_config(
        folder,
        model_type="swin",
        depths=[1, 1],
        num_heads=[2, 4],
        embed_dim=32,
        image_size=96,
        patch_size=4,
        window_size=3,
    )
    with pytest.raises(CalibrationError, match="swin is a hierarchical tower"):
        load_tower(str(folder))


def test_names_with_another_prefix_are_found(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    weights = load_file(folder / "model.safetensors")
    moved = {f"model.{n.replace('vision_model.', '')}": w for n, w in weights.items()}
    save_file(moved, folder / "model.safetensors")
    assert (
        load_tower(str(folder)).info.digest == load_tower(str(MODELS / "scenes-llava")).info.digest
    )


def test_the_command_writes_a_profile_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for seed in range(20):
        make_picture(120 + 8 * (seed % 3), 100, seed).save(images / f"{seed}.png")
    output, report = tmp_path / "out" / "profile.json", tmp_path / "report"
    words = [str(MODELS / "scenes-llava"), "--images", str(images), "--width", "3"]
    assert command.main([*words, "-o", str(output), "--report", str(report)]) == 0
    assert json.loads(output.read_text())["provenance"]["images"]["used"] == 20
    assert [path.name for path in report.iterdir()] == ["index.html"]
    assert "warning: Only 20 images" in capsys.readouterr().out


def test_a_mistake_is_one_sentence_and_leaves_no_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "profile.json"
    words = ["nowhere", "--images", str(tmp_path), "-o", str(output), "--report", str(tmp_path)]
    assert command.main(words) == 1
    assert capsys.readouterr().err.startswith("msdg-vllm calibrate: no image in")
    assert not output.exists()

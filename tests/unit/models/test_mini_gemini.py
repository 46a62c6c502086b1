"""Parts of Mini-Gemini against timm, Hugging Face, SentencePiece and the literal formulas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from sentencepiece import SentencePieceProcessor
from timm.models.convnext import ConvNeXt
from transformers import AutoConfig, AutoTokenizer

from msdg_vllm.core.profiles import EncoderProfile
from msdg_vllm.models.mini_gemini.config import MGMConfig, register_configs
from msdg_vllm.models.mini_gemini.convnext import ConvNextTower
from msdg_vllm.models.mini_gemini.images import MiniGeminiImages
from msdg_vllm.models.mini_gemini.mining import PatchInfoMining, squares_of
from msdg_vllm.models.mini_gemini.prepare import main as prepare_main
from msdg_vllm.models.mini_gemini.processor import layout_of
from msdg_vllm.models.mini_gemini.weights import WEIGHT_NAMES, folder_weights
from tests.mini_gemini_checkpoint import (
    SENTENCEPIECE,
    VISION,
    VISION_AUX,
    connector_weights,
    convnext_weights,
    make_mini_gemini,
    make_tower_folders,
)
from tests.mini_gemini_reference import MiniGeminiReference
from tests.pictures import SIZES, picture_of

PROFILE = EncoderProfile(
    direction_layers=(2, 23), saliency_window=(14, 19), sink_layer=12, sink_coordinate=7
)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mini_gemini(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def published_hd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mini_gemini(tmp_path_factory.mktemp("published_hd"), hd=True, old_names=True)


@pytest.fixture(scope="module")
def prepared(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("prepared") / "model"
    assert prepare_main([str(published), str(target)]) == 0
    return target


@pytest.fixture(scope="module", params=["base", "hd"])
def reference(
    request: pytest.FixtureRequest, published: Path, published_hd: Path
) -> MiniGeminiReference:
    return MiniGeminiReference(published_hd if request.param == "hd" else published, PROFILE)


def config_of(folder: Path) -> MGMConfig:
    register_configs()
    config = AutoConfig.from_pretrained(folder)
    assert isinstance(config, MGMConfig)
    return config


def test_the_sizes_of_the_published_models_need_no_key_of_ours() -> None:
    base = MGMConfig(image_size_aux=768, image_grid=1)
    hd = MGMConfig(image_size_aux=1536, image_grid=2, image_global=True)
    assert (base.num_tiles, base.tokens_per_tile) == (1, 576)
    assert (hd.num_tiles, hd.tokens_per_tile) == (5, 576)
    assert base.vision_config.num_hidden_layers == 24
    with torch.device("meta"):
        tower = ConvNextTower(**base.vision_aux_config)
        maps = tower(torch.empty(1, 3, 768, 768))
        squares = squares_of(maps[0], base.tokens_per_side).flatten(0, 1).flatten(1, 2)
        mined = PatchInfoMining(1024, 2880)(torch.empty(576, 1024), squares)
    assert maps.shape == (1, 2880, 192, 192)
    assert squares.shape == (576, 64, 2880)
    assert mined.shape == (576, 1024)
    assert len(tower.state_dict()) == 340
    assert sum(weight.numel() for weight in tower.parameters()) == pytest.approx(196.2e6, rel=1e-3)


@pytest.mark.parametrize(
    "key",
    [
        {"image_size_aux": 700},
        {"image_grid": 2, "image_size_aux": 1536},
        {"image_aspect_ratio": "anyres"},
    ],
)
def test_a_geometry_that_does_not_add_up_is_refused(key: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="image_"):
        MGMConfig(**key)


def test_a_configuration_survives_saving_and_loading(published_hd: Path, tmp_path: Path) -> None:
    config = config_of(published_hd)
    config.save_pretrained(tmp_path)
    again = config_of(tmp_path)
    assert again.vision_config.hidden_size == VISION["hidden_size"]
    assert again.vision_aux_config == VISION_AUX
    assert (again.model_type, again.num_tiles) == ("mini_gemini", 5)
    assert again.to_diff_dict() == config.to_diff_dict()


def test_convnext_maps_equal_timm() -> None:
    torch.manual_seed(0)
    weights = convnext_weights()
    tower = ConvNextTower(**VISION_AUX)
    tower.load_state_dict(weights)
    timm = ConvNeXt(depths=tuple(VISION_AUX["depths"]), dims=tuple(VISION_AUX["widths"]))
    timm.load_state_dict({n.removeprefix("vision_"): w for n, w in weights.items()}, strict=False)
    pixels = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        x = timm.stem(pixels)
        stages = [x := stage(x) for stage in timm.stages]
        expected = torch.cat(
            [torch.nn.functional.interpolate(s, size=(24, 24), mode="bilinear") for s in stages], 1
        )
        torch.testing.assert_close(tower(pixels), expected, rtol=1e-4, atol=1e-4)


def mining() -> PatchInfoMining:
    torch.manual_seed(1)
    module = PatchInfoMining(VISION["hidden_size"], sum(VISION_AUX["widths"]))
    module.load_state_dict(
        {
            name.removeprefix("model."): weight
            for name, weight in connector_weights().items()
            if "vlm_uni" in name
        }
    )
    return module


def test_squares_are_cut_row_by_row() -> None:
    maps = torch.arange(2 * 3 * 8 * 8).view(2, 3, 8, 8)
    squares = squares_of(maps, 4)
    assert squares.shape == (2, 4, 4, 2, 2, 3)
    assert torch.equal(squares[1, 2, 3, 1, 0], maps[1, :, 5, 6])


@torch.no_grad()
def test_mining_equals_its_formula_with_keys_and_values_of_every_position() -> None:
    module = mining()
    tokens, squares = torch.randn(10, 64) * 3, torch.randn(10, 16, 160) * 3
    query = module.vlm_uni_query_projector(tokens)
    keys, values = module.vlm_uni_aux_projector(squares), module.vlm_uni_val_projector(squares)
    attention = torch.einsum("nd,npd->np", query, keys).div(64**0.5).softmax(-1)
    expected = tokens + torch.einsum("np,npd->nd", attention, values)
    assert attention.max() > 0.5  # some tokens look at one position: no uniform average
    torch.testing.assert_close(module(tokens, squares), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_mining_kept_tokens_equals_keeping_mined_tokens() -> None:
    module = mining()
    tokens, squares = torch.randn(64, 64), torch.randn(64, 16, 160)
    keep = torch.tensor([0, 3, 17, 40, 63])
    torch.testing.assert_close(
        module(tokens[keep], squares[keep]), module(tokens, squares)[keep], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("kind", SIZES)
def test_pixels_equal_the_reference(reference: MiniGeminiReference, kind: str) -> None:
    image = picture_of(kind, 3)
    high, tiles = reference.pixels(image)
    features = MiniGeminiImages(config_of(reference.folder))(images=[image])
    torch.testing.assert_close(features["pixel_values_aux"], high, rtol=0, atol=1e-5)
    # Inside the product the whole image comes first, as the language model reads it.
    expected = torch.cat([tiles[-1:], tiles[:-1]])
    torch.testing.assert_close(features["pixel_values"][0], expected, rtol=0, atol=1e-5)


def test_hd_reads_the_whole_image_first_then_the_cells(published_hd: Path) -> None:
    layout = layout_of(config_of(published_hd))
    assert layout.tile_sizes == (64,) * 5
    assert layout.order.tolist() == list(range(5 * 64))
    assert layout.budget(0.111) == 5 * 7


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("model.embed_tokens.weight", "language_model.model.embed_tokens.weight"),
        ("lm_head.weight", "language_model.lm_head.weight"),
        (
            "model.vision_tower.vision_tower.vision_model.pre_layrnorm.bias",
            "vision_tower.vision_model.pre_layrnorm.bias",
        ),
        ("model.vision_tower.vision_tower.vision_model.embeddings.position_ids", None),
        ("model.vision_tower.vision_tower.text_model.final_layer_norm.bias", None),
        (
            "model.vision_tower_aux.vision_stages.2.blocks.26.gamma",
            "vision_tower_aux.vision_stages.2.blocks.26.gamma",
        ),
        ("model.vlm_uni_aux_projector.1.weight", "mining.vlm_uni_aux_projector.1.weight"),
        ("model.mm_projector.0.weight", "multi_modal_projector.linear_1.weight"),
        ("model.mm_projector.2.bias", "multi_modal_projector.linear_2.bias"),
        (
            "convnext_folder.visual.trunk.stem.0.weight",
            "vision_tower_aux.vision_stem.0.weight",
        ),
        ("convnext_folder.visual.trunk.head.norm.weight", None),
    ],
)
def test_published_names_find_their_place(name: str, ours: str | None) -> None:
    assert WEIGHT_NAMES.map_name(name) == ours


def test_prepared_prompt_is_cut_at_the_image_as_in_training(prepared: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(prepared)
    pieces = SentencePieceProcessor(model_file=str(SENTENCEPIECE))
    messages = [
        {
            "role": "user",
            "content": [{"type": "image"}, {"type": "text", "text": "What is on the left?"}],
        }
    ]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == (
        "<s>A chat between a curious user and an artificial intelligence assistant. The assistant "
        "gives helpful, detailed, and polite answers to the user's questions. "
        "USER: <image>\nWhat is on the left? ASSISTANT:"
    )
    before, after = prompt.removeprefix("<s>").split("<image>")
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids == [1, *pieces.encode(before), 32000, *pieces.encode(after)]
    assert tokenizer.encode(prompt.removeprefix("<s>")) == ids


def test_prepared_template_renders_turns_and_plain_strings(prepared: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(prepared)
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "<image>\nWho?"},
        {"role": "assistant", "content": "Ann."},
        {"role": "user", "content": "Where?"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<s>Be short. USER: <image>\nWho? ASSISTANT: Ann.</s>USER: Where? ASSISTANT:"
    )


def test_prepared_folder_links_the_weights(published: Path, prepared: Path) -> None:
    link = prepared / "model.safetensors"
    assert link.is_symlink()
    assert link.resolve() == (published / "model.safetensors").resolve()
    assert json.loads((prepared / "config.json").read_text())["image_token_index"] == 32000


def test_folders_of_towers_are_named_and_checked(published: Path, tmp_path: Path) -> None:
    clip, convnext = make_tower_folders(tmp_path / "towers", seed=5)
    target = tmp_path / "target"
    options = ["--clip-folder", str(clip), "--convnext-folder", str(convnext)]
    assert prepare_main([str(published), str(target), *options]) == 0
    config = config_of(target)
    assert [source.model_or_path for source in folder_weights(config)] == [str(clip), str(convnext)]
    (convnext / "open_clip_pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"vision_tower_aux_folder .* remove the key"):
        folder_weights(config)


@pytest.mark.parametrize("trouble", ["absent", "other model", "no weights", "target in use"])
def test_preparing_names_what_is_wrong(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], trouble: str
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    words = {
        "absent": "holds no config.json",
        "other model": "of model type 'llama'; Mini-Gemini checkpoints are mgm or mini_gemini",
        "no weights": "download the weights",
        "target in use": "already holds a checkpoint",
    }[trouble]
    if trouble != "absent":
        source.mkdir()
        model_type = "llama" if trouble == "other model" else "mgm"
        (source / "config.json").write_text(json.dumps({"model_type": model_type}))
    if trouble == "target in use":
        target.mkdir()
        (target / "config.json").write_text("{}")
    assert prepare_main([str(source), str(target)]) == 1
    assert words in capsys.readouterr().err

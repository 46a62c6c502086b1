"""What cannot work stops the start with the way out; what is not ours is served as ever."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    PixtralImageProcessor,
    PixtralProcessor,
    PixtralVisionConfig,
)

from msdg_vllm.core.errors import ProfileError, RequestError, SettingsError
from tests.checkpoints import CHAT_TEMPLATE, make_llava, make_tokenizer
from tests.engine.generation import generate, running_engine
from tests.pictures import picture_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llava(tmp_path_factory.mktemp("llava"), image_size=56)


def test_encoder_without_profile_is_pruned_by_a_method_that_needs_none(
    folder: Path, tmp_path: Path
) -> None:
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "msdg_profile.json").unlink()
    request = {
        "prompt": "USER: <image>\nWhat is it? ASSISTANT:",
        "multi_modal_data": {"image": picture_of("square", 1)},
    }
    with running_engine(bare) as llm:
        by_default, by_name = generate(
            llm,
            [
                {**request, "mm_processor_kwargs": {"retention": 0.5, "pruning": options}}
                for options in ({}, {"method": "divprune"})
            ],
        )
        assert by_default == by_name
        with pytest.raises(RequestError, match=r"'msdg'.*no.* for this one.*msdg-vllm calibrate"):
            generate(
                llm,
                [
                    {
                        **request,
                        "mm_processor_kwargs": {"retention": 0.5, "pruning": {"method": "msdg"}},
                    }
                ],
            )


def test_a_default_method_that_reads_a_profile_needs_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "msdg_profile.json").unlink()
    monkeypatch.setenv("MSDG_DEFAULT_METHOD", "msdg")
    with pytest.raises(SettingsError, match=r"MSDG_DEFAULT_METHOD.*msdg-vllm calibrate"):
        start(bare)


def test_broken_profile_stops_the_start_and_names_the_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text('{"direction_layers": [2, 23]}')
    monkeypatch.setenv("MSDG_PROFILE", str(profile))
    with pytest.raises(ProfileError, match=r"profile\.json: missing profile fields"):
        start(folder)


def start(folder: Path) -> None:
    with running_engine(folder):
        pass


def make_pixtral(folder: Path) -> Path:
    """A tiny Pixtral in Hugging Face's format, which goes by LLaVA's architecture name."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(["[IMG]", "[IMG_BREAK]", "[IMG_END]"])
    config = LlavaConfig(
        vision_config=PixtralVisionConfig(
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=64,
            patch_size=16,
        ),
        text_config=MistralConfig(
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=512,
            max_position_embeddings=512,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        projector_hidden_act="gelu",
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    PixtralProcessor(
        image_processor=PixtralImageProcessor(
            size={"longest_edge": 64}, patch_size={"height": 16, "width": 16}
        ),
        tokenizer=tokenizer,
        patch_size=16,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_pixtral_of_the_same_architecture_name_stays_stock(tmp_path: Path) -> None:
    request: dict[str, Any] = {
        "prompt": "[IMG]What is this?",
        "multi_modal_data": {"image": picture_of("square")},
    }
    with running_engine(make_pixtral(tmp_path), max_model_len=512) as llm:
        (answer,) = generate(llm, [request])
        assert len(answer.token_ids) == 6
        with pytest.raises(RequestError, match="retention is not available for Pixtral"):
            generate(llm, [{**request, "mm_processor_kwargs": {"retention": 0.5}}])

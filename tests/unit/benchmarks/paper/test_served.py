"""A server that cannot measure a row is refused with what to do."""

from dataclasses import replace

import pytest

from benchmarks.paper.__main__ import main
from benchmarks.paper.published import paper_tables
from benchmarks.paper.served import Endpoint, mean_milliseconds
from benchmarks.shared.client import ServerError
from msdg_vllm.core.profiles import BUILT_IN_PROFILES, EncoderProfile

TABLES = paper_tables()
CLIP = BUILT_IN_PROFILES["clip-vit-large-patch14-336"]
LLAVA = Endpoint(
    url="http://127.0.0.1:8000",
    model="llava-hf/llava-1.5-7b-hf",
    names=("llava-hf/llava-1.5-7b-hf",),
    architecture="LlavaForConditionalGeneration",
    version="0.1.0",
    methods=("msdg",),
    profile=CLIP,
)


@pytest.mark.parametrize(
    "names",
    [
        ("llava-hf/llava-1.5-7b-hf",),
        ("short", "/models/llava-1.5-7b-hf/"),
        ("LLaVA-1.5-7B-HF",),
    ],
)
def test_the_tables_model_is_known_by_name_or_folder(names: tuple[str, ...]) -> None:
    replace(LLAVA, names=names).check(TABLES["llava15"], "Ours")


def test_another_model_is_refused() -> None:
    with pytest.raises(ServerError, match=r"llava15-13b is measured on llava-hf/llava-1.5-13b-hf"):
        LLAVA.check(TABLES["llava15-13b"], "Ours")


def test_another_architecture_under_the_same_name_is_refused() -> None:
    stranger = replace(LLAVA, architecture="LlavaNextForConditionalGeneration")
    with pytest.raises(ServerError, match=r"--served-model-name llava-hf/llava-1.5-7b-hf"):
        stranger.check(TABLES["llava15"], "Ours")


def test_a_method_that_is_not_served_is_refused() -> None:
    with pytest.raises(ServerError, match="'visionzip', but the server offers msdg"):
        LLAVA.check(TABLES["llava15"], "VisionZip")


def test_a_row_of_another_profile_is_refused_with_the_profile_it_needs() -> None:
    with pytest.raises(ServerError) as caught:
        LLAVA.check(TABLES["llava-window"], "0->5")
    text = str(caught.value)
    wanted = EncoderProfile.from_json(text[text.index("{") : text.index("}") + 1])
    assert wanted == replace(CLIP, saliency_window=(0, 5))
    replace(LLAVA, profile=wanted).check(TABLES["llava-window"], "0->5")


def test_a_server_that_is_down_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["llava15", "--server", "http://127.0.0.1:9"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: no server at http://127.0.0.1:9")
    assert "python -m server" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llava15", "--columns", "GQA", "MMMU"], "--columns of llava15 must be among GQA, MMB"),
        (["llava15", "--row", "FastV"], "--row of llava15 must be among DivPrune"),
        (["llava15", "--limit", "0"], "--limit must be at least 1, got 0"),
        (["table99"], "invalid choice: 'table99'"),
    ],
)
def test_a_mistake_on_the_command_line_names_what_is_allowed(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_times_are_means_over_the_requests_in_between() -> None:
    before = {"inference": (10.0, 100.0)}
    assert mean_milliseconds(before, {"inference": (10.5, 110.0)}) == {"inference": 50.0}
    with pytest.raises(ServerError, match="no request"):
        mean_milliseconds(before, before)

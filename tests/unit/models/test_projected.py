"""Models that are pruned by their projected tokens: which methods, and which images."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.multimodal.processing import PromptUpdateDetails

from msdg_vllm.core.errors import ProfileError, RequestError
from msdg_vllm.core.profiles import BUILT_IN_PROFILES
from msdg_vllm.engine.api.processor import SPECS
from msdg_vllm.engine.spec import UNPRUNED, PruningSpec
from msdg_vllm.methods import METHODS, method_named
from msdg_vllm.models.projected import ProjectedProcessor, encoder_of

CONFIG = SimpleNamespace(vision_config=SimpleNamespace(num_hidden_layers=27))
IMAGE, TEXT = 9, 1


class FixedProcessor(ProjectedProcessor):
    """Has the placeholders that a test gives it."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def _get_prompt_updates(self, *_: Any) -> Any:
        replacement = self.content if callable(self.content) else lambda _: self.content
        return [SimpleNamespace(modality="image", target=[IMAGE], replacement=replacement)]


def with_text(token_ids: list[int]) -> PromptUpdateDetails:
    return PromptUpdateDetails.select_token_id(token_ids, IMAGE)


def test_methods_that_read_the_encoder_are_refused_and_no_others() -> None:
    encoder = encoder_of(CONFIG, None)
    refused = {name for name in METHODS if method_named(name).unmet_need(encoder)}
    assert refused.isdisjoint({"random", "divprune", "prunesid", "cdpruner", "dart0"})
    assert refused >= {"msdg", "cls_attention", "visionzip", "hiprune", "evocut"}
    for name in refused - {"resize"}:  # which reads nothing, but wants images at any size
        assert "only projected tokens" in str(method_named(name).unmet_need(encoder))


def test_a_profile_stops_the_start() -> None:
    profile = BUILT_IN_PROFILES["clip-vit-large-patch14-336"]
    with pytest.raises(ProfileError, match=r"projected tokens alone.*start without one"):
        encoder_of(CONFIG, profile)


@pytest.mark.parametrize(
    "content",
    [[IMAGE] * 5, with_text([TEXT, *[IMAGE] * 5, TEXT]), PromptUpdateDetails([IMAGE] * 5)],
)
def test_an_image_has_as_many_tokens_as_stock_placeholders(content: Any) -> None:
    processor = FixedProcessor(content)
    assert processor.num_visual_tokens(None, "image", 0, {}) == 5
    assert processor.placeholder_ids() == {IMAGE: "image"}


@pytest.mark.parametrize("budget", [1, 3, 4])
def test_text_between_tokens_is_refused_only_when_tokens_go(budget: int) -> None:
    processor = FixedProcessor(with_text([TEXT, IMAGE, IMAGE, TEXT, IMAGE, IMAGE]))
    specs = {"image": [UNPRUNED, PruningSpec(budget=budget, num_tokens=4)]}
    items: Any = {"image": None}
    if budget == 4:
        processor.check_prompt({SPECS: specs}, items, {})
        return
    with pytest.raises(RequestError, match=r"image 1: .*text between its tokens") as refusal:
        processor.check_prompt({SPECS: specs}, items, {})
    assert refusal.value.parameter == "retention"

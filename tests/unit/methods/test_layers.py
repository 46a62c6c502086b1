"""Which layers the methods read, of encoders of any depth."""

from dataclasses import replace

import pytest
import torch

from msdg_vllm.core.profiles import EncoderProfile, built_in_profile
from msdg_vllm.methods import METHODS, Encoder, Needs, method_named, unmet_need
from msdg_vllm.methods.visionzip import num_contextual_tokens
from tests.unit.methods.cases import LAST, MIDDLE, make_image

# LLaVA runs 23 of the 24 layers of CLIP-ViT-L.
CLIP = Encoder(num_layers=23, profile=built_in_profile("clip-vit-large-patch14-336"))
QWEN2_5_VL = Encoder(
    num_layers=32,
    profile=built_in_profile("qwen2.5-vl"),
    has_class_token=False,
    global_layers=(7, 15, 23, 31),
    patches_per_token=4,
    free_resolution=True,
)
SMALL = Encoder(
    num_layers=11,
    profile=EncoderProfile(
        direction_layers=(1, 11), saliency_window=(5, 8), sink_layer=4, sink_coordinate=3
    ),
)


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("cls_attention", Needs(class_attention=(22,))),
        (
            "visionzip",
            Needs(class_attention=(22,), keys=(22,), features=True, visual=True, merging=True),
        ),
        ("divprune", Needs(visual=True)),
        ("prunesid", Needs(class_attention=(22,), features=True)),
        ("hiprune", Needs(received_attention=(8, 22))),
        ("cdpruner", Needs(visual=True, query=True)),
        ("evocut", Needs(states=tuple(range(2, 24)))),
        ("representation_shift", Needs(mlp_updates=(16,), states=(13,))),
        ("dart0", Needs(visual=True, query=True)),
        ("cen_divprune", Needs(visual=True)),
        ("cen_cdpruner", Needs(visual=True, query=True)),
    ],
)
def test_on_clip_a_method_reads_the_layers_of_its_original(name: str, needs: Needs) -> None:
    assert method_named(name).needs(CLIP) == needs


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("visionzip", Needs(received_attention=(31,), keys=(31,), visual=True, merging=True)),
        ("prunesid", Needs(visual=True)),
        ("hiprune", Needs(received_attention=(15, 31))),
        ("representation_shift", Needs(mlp_updates=(21,), states=(18,))),
    ],
)
def test_without_a_class_token_a_method_reads_global_attention_or_none(
    name: str, needs: Needs
) -> None:
    assert method_named(name).needs(QWEN2_5_VL) == needs


@pytest.mark.parametrize("name", [name for name in METHODS if "resize" not in name])
def test_a_small_tower_can_feed_every_method_but_those_that_scale(name: str) -> None:
    assert unmet_need(method_named(name).needs(SMALL), SMALL) is None


def test_only_the_method_named_after_the_class_token_needs_one() -> None:
    refused = [n for n in METHODS if unmet_need(method_named(n).needs(QWEN2_5_VL), QWEN2_5_VL)]
    assert refused == ["cls_attention"]


@pytest.mark.parametrize(
    ("budget", "merged"), [(1, 0), (2, 1), (9, 1), (32, 5), (64, 10), (128, 20), (192, 30)]
)
def test_visionzip_merges_into_ten_tokens_of_sixty_four(budget: int, merged: int) -> None:
    assert num_contextual_tokens(budget) == merged


def kept_around(anchor: int, *unattended: int) -> set[int]:
    """What HiPrune keeps of two frames of 6 x 8 tokens, some of which the last layer shuns."""
    image = replace(make_image(0, "flat", num_tokens=96), grids=((6, 8), (6, 8)))
    middle, deep = torch.zeros(96), torch.zeros(96)
    middle[anchor] = 1.0
    deep[list(unattended)] = -1.0
    signals = replace(image.signals, received_attention={MIDDLE: middle, LAST: deep})
    return set(method_named("hiprune").select(replace(image, signals=signals), 26).indices.tolist())


def test_the_neighbours_of_an_anchor_do_not_wrap_around_the_edge_of_the_grid() -> None:
    # 15 ends the second row; 16 begins the third.
    kept = kept_around(15, 7, 14, 16, 23)
    assert {7, 14, 15, 23} <= kept
    assert 16 not in kept


def test_the_neighbours_of_an_anchor_stay_in_its_frame() -> None:
    # 43 is in the last row of the first frame; 51 below it in the first row of the second.
    kept = kept_around(43, 35, 51)
    assert {35, 42, 43, 44} <= kept
    assert 51 not in kept


@pytest.mark.parametrize("name", ["msdg", "evocut", "representation_shift"])
def test_methods_that_filter_sinks_do_without_them_where_there_are_none(name: str) -> None:
    method = method_named(name)
    image = make_image(0, "random", num_tokens=20)
    bare = replace(
        image.encoder.measured, saliency_window=None, sink_layer=None, sink_coordinate=None
    )
    image = replace(image, encoder=replace(image.encoder, profile=bare))
    needs = method.needs(image.encoder)
    assert unmet_need(needs, image.encoder) is None
    choice = method.select(image, 3)
    assert len(choice.indices) == 3
    assert choice.sinks is not None
    assert not choice.sinks.any()

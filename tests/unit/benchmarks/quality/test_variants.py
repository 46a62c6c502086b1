"""The ablations are the paper's, and fit encoders of any depth."""

import pytest

from benchmarks.quality.variants import OURS, Variant, ablations
from msdg_vllm.core.profiles import EncoderProfile, built_in_profile

BUNDLED = EncoderProfile(
    direction_layers=(2, 11), saliency_window=(8, 11), sink_layer=4, sink_coordinate=0
)


@pytest.mark.parametrize(
    ("profile", "num_layers"), [(BUNDLED, 12), (built_in_profile("qwen2.5-vl"), 32)]
)
def test_every_table_holds_the_method_as_it_is_once_and_no_layer_is_missing(profile, num_layers):
    for ablation in ablations(profile, num_layers):
        ours = [variant for variant in ablation.variants if variant.name == OURS]
        assert [variant.profile for variant in ours] == [profile]
        for variant in ablation.variants:
            layers = variant.options.layers(variant.profile)
            assert all(0 <= layer <= num_layers for layer in layers)


def test_a_name_means_one_variant():
    by_name: dict[str, Variant] = {}
    for ablation in ablations(BUNDLED, 12):
        for variant in ablation.variants:
            known = by_name.setdefault(variant.name, variant)
            assert (known.profile, known.options) == (variant.profile, variant.options)
    settings = [(variant.profile, variant.options) for variant in by_name.values()]
    assert all(settings.count(setting) == 1 for setting in settings)


def test_qwens_tables_are_those_of_the_paper():
    found = {a.title: [v.label for v in a.variants] for a in ablations(_qwen(), 32)}
    assert found["Number of groups"] == [
        *("K = 8", "K = 12", "K = 16", "K = 20 (ours)", "K = 24", "K = 28")
    ]
    assert found["Early endpoint of directions"] == [
        *("ℓ₀ = 0", "ℓ₀ = 1", "ℓ₀ = 2 (ours)", "ℓ₀ = 3")
    ]
    assert found["Late endpoint of directions"] == [
        *("ℓ_d = L", "ℓ_d = L−1 (ours)", "ℓ_d = L−2", "ℓ_d = L−3")
    ]
    assert {"19 → 22", "19 → 24 (ours)", "19 → 26"} <= set(found["Width of the saliency window"])
    assert {"0 → 5", "19 → 24 (ours)", "27 → 32"} <= set(found["Place of the saliency window"])


def _qwen():
    return built_in_profile("qwen2.5-vl")

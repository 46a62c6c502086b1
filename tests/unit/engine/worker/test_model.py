"""How items are cut into batches for the encoder."""

from __future__ import annotations

from msdg_vllm.core.profiles import built_in_profile
from msdg_vllm.engine.spec import PruningSpec
from msdg_vllm.engine.worker.model import PruningModel
from msdg_vllm.methods import Encoder, method_named


def test_a_method_that_holds_more_states_is_encoded_in_smaller_batches() -> None:
    model = object.__new__(PruningModel)
    model.encoder = Encoder(23, built_in_profile("clip-vit-large-patch14-336"))
    model.max_tower_tokens = 12 * 576
    model.num_profiled_states = method_named("msdg").needs(model.encoder).num_held_states

    def batches(method: str) -> list[int]:
        weight = model._weight([PruningSpec(budget=64, num_tokens=576, method=method)])
        return [len(batch) for batch in model._micro_batches([weight * 576] * 12)]

    assert batches("msdg") == batches("random") == batches("hiprune") == [12]
    # Memory was profiled with four states' worth; this one holds 22.
    assert batches("evocut") == [2] * 6

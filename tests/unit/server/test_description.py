"""What GET /v1/pruning says about a model whose encoder has no profile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from msdg_vllm.engine.api.processor import PruningProcessor
from msdg_vllm.engine.encoder import Offer, allowed_methods
from msdg_vllm.methods import Encoder
from msdg_vllm.settings import Settings
from server.description import describe


class FakeProcessor(PruningProcessor):
    """A processor that knows its encoder and nothing else."""

    def __init__(self, encoder: Encoder) -> None:
        allowed = allowed_methods(Settings(), "divprune")
        self.offer = Offer(Settings(), None, encoder, "divprune", allowed)
        self.info: Any = SimpleNamespace(allowed_mm_limits={"image": 1})


def test_a_missing_profile_and_what_follows_from_it_are_said() -> None:
    processor = FakeProcessor(Encoder(num_layers=27, profile=None, has_class_token=False))
    client: Any = SimpleNamespace(
        model_config=SimpleNamespace(
            architecture="Qwen3VLForConditionalGeneration", max_model_len=4096
        ),
        renderer=SimpleNamespace(get_mm_processor=lambda: processor),
    )
    described = describe(client, "qwen3-vl")
    assert described.encoder.model_dump() == {"name": None, "profile": None}
    assert described.default_method == "divprune"
    assert "msdg" not in described.methods
    assert "msdg-vllm calibrate" in described.unavailable_methods["msdg"]
    assert "class token" in described.unavailable_methods["cls_attention"]
    assert "--methods" in described.unavailable_methods["prunesid"]
    assert described.unavailable_methods.keys().isdisjoint(described.methods)

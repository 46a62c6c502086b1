"""Selections are computed in float32, whatever precision the server allows its own products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from msdg_vllm.engine.worker import capture
from msdg_vllm.methods import Encoder, Needs, Question, method_named
from tests.unit.engine.worker.test_capture import Block, run
from tests.unit.methods.test_seam import WIDTH, fitting, images_for

WITHOUT_PRODUCTS = {
    "random",
    "cls_attention",
    "hiprune",
    "representation_shift",
    "pool",
    "resize",
}
PRODUCTS = {"mm", "bmm", "mv", "addmm", "addmv", "baddbmm", "dot", "linear", "matmul"}


class FullProducts(TorchDispatchMode):
    """Fails on a product of float32 that a GPU may round to TF32."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in PRODUCTS:
            self.count += 1
            assert torch.get_float32_matmul_precision() == "highest", func
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def high() -> Iterator[None]:
    """What `VLLM_FLOAT32_MATMUL_PRECISION=high` does to a worker."""
    torch.set_float32_matmul_precision("high")
    yield
    assert torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("name", "encoder"), fitting())
def test_no_product_of_a_method_is_rounded(name: str, encoder: Encoder) -> None:
    method = method_named(name)
    images = images_for(method.needs(encoder), encoder)
    with FullProducts() as products:
        method.select_all(method.analyze(images), [Question(9, torch.randn(3, WIDTH))] * 3)
    assert products.count or name in WITHOUT_PRODUCTS


def test_no_product_of_captured_attention_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watched(read: Any) -> Any:
        def read_and_note(*args: Any) -> Any:
            seen.append(torch.get_float32_matmul_precision())
            return read(*args)

        return read_and_note

    for name in ("class_attention", "received_attention"):
        monkeypatch.setattr(capture, name, watched(getattr(capture, name)))
    blocks: Any = torch.nn.ModuleList([Block()])
    needs = Needs(class_attention=(0,), received_attention=(0,))
    with capture.capture_signals(blocks, needs, lambda block: block.attention):
        run(blocks, torch.randn(1, 11, 12))
    assert seen == ["highest"] * 2

"""Images that were encoded once: the same selections without signals, for whom they may serve."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from msdg_vllm.engine.spec import PruningSpec
from msdg_vllm.engine.worker.image_store import ImageStore, SelectionMemory, StepPlan
from msdg_vllm.engine.worker.selection import EncodedImage, analyze_images, select_analyzed
from msdg_vllm.methods import METHODS, Selection, Signals, method_named
from msdg_vllm.models.llava_next import layout_of
from tests.unit.engine.test_layout import next_config
from tests.unit.engine.worker.test_selection import ENCODER, encoded, whole_tiles

HOST = torch.device("cpu")
RESUMABLE = [name for name in METHODS if method_named(name).can_resume(ENCODER)]


def spec_of(content: int, method: str = "msdg", **changes: object) -> PruningSpec:
    spec = PruningSpec(budget=9, num_tokens=36, method=method, content=content)
    return replace(spec, **changes)  # type: ignore[arg-type]


def kept_in(store: ImageStore, image: EncodedImage, spec: PruningSpec) -> None:
    store.keep(image, [spec], analyze_images([image], [spec], ENCODER))


def known(store: ImageStore, spec: PruningSpec, image: EncodedImage) -> EncodedImage:
    """What is left of an image: no signals."""
    stored = store.get(spec.content, HOST)
    return EncodedImage(Signals(), stored.rows, image.layout, findings=stored.findings)


@pytest.mark.parametrize("scope", ["tile", "image"])
@pytest.mark.parametrize("method", RESUMABLE)
def test_another_question_selects_the_same_from_what_was_kept(method: str, scope: str) -> None:
    layout = layout_of(next_config(side=6), 480, 640)
    (image,) = encoded([layout], seed=5)
    store = ImageStore(2**20, ENCODER)
    first = spec_of(1, method, scope=scope, budget=20)
    kept_in(store, image, first)
    second = replace(first, query_ids=(4, 5), budget=33, explanation=1)
    assert store.has(second)
    query = torch.randn(2, 16)
    (expected,) = select_analyzed(analyze_images([image], [second], ENCODER), [second], [query])
    again = known(store, second, image)
    (found,) = select_analyzed(analyze_images([again], [second], ENCODER), [second], [query])
    assert torch.equal(found.indices, expected.indices)
    for name in ("scores", "groups", "sinks"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None and theirs is None) or torch.equal(ours, theirs), name
    assert torch.equal(again.rows_of(found), image.rows_of(expected))


def test_methods_that_read_more_than_tokens_and_findings_miss() -> None:
    (image,) = encoded([whole_tiles(1, 36)])
    store = ImageStore(2**20, ENCODER)
    kept_in(store, image, spec_of(1))
    others = set(METHODS) - set(RESUMABLE)
    assert {"visionzip", "hiprune", "evocut"} <= others
    assert not any(store.has(spec_of(1, method)) for method in others)


def test_findings_of_one_method_do_not_serve_another_but_tokens_do() -> None:
    (image,) = encoded([whole_tiles(1, 36)])
    store = ImageStore(2**20, ENCODER)
    kept_in(store, image, spec_of(1, "cdpruner"))
    assert store.has(spec_of(1, "divprune"))
    assert not store.has(spec_of(1, "msdg"))
    kept_in(store, image, spec_of(1, "msdg"))
    assert store.has(spec_of(1, "msdg"))
    assert store.has(spec_of(1, "cdpruner"))
    # A scope that came later joins the one that was there.
    kept_in(store, image, spec_of(1, "msdg", scope="image"))
    assert store.has(spec_of(1, "msdg"))
    assert store.has(spec_of(1, "msdg", scope="image"))


def test_an_image_without_a_key_is_never_kept() -> None:
    (image,) = encoded([whole_tiles(1, 36)])
    store = ImageStore(2**20, ENCODER)
    kept_in(store, image, spec_of(0))
    assert store.snapshot()["image_store_images"] == 0
    assert not store.has(spec_of(0))


def test_a_store_of_no_bytes_keeps_nothing() -> None:
    (image,) = encoded([whole_tiles(1, 36)])
    store = ImageStore(0, ENCODER)
    kept_in(store, image, spec_of(1))
    assert not store.has(spec_of(1))
    plan = StepPlan.of([spec_of(1)], store)
    assert (plan.askers, store.misses) == ({0: [0]}, 0)


def test_a_step_is_parted_into_what_is_kept_and_what_is_encoded_once() -> None:
    (image,) = encoded([whole_tiles(1, 36)])
    store = ImageStore(2**20, ENCODER)
    kept_in(store, image, spec_of(7))
    plan = StepPlan.of(
        [
            spec_of(8),
            spec_of(7, query_ids=(1,)),
            PruningSpec(0, 0),
            spec_of(8, "visionzip"),
            spec_of(0),
            spec_of(8, query_ids=(2,)),
            spec_of(0),
        ],
        store,
    )
    assert plan.kept == {1}
    assert plan.askers == {0: [0, 3, 5], 4: [4], 6: [6]}
    assert (store.hits, store.misses) == (2, 1)


def test_a_remembered_selection_wins_over_a_new_one() -> None:
    memory = SelectionMemory()
    first = Selection(torch.tensor([1, 5, 9]))
    spec = spec_of(1, budget=3, query_ids=(4,))
    assert memory.settle(spec, first) is first
    other = Selection(torch.tensor([1, 6, 9]), scores=torch.rand(36))
    settled = memory.settle(replace(spec, explanation=5), other)
    assert settled.indices.tolist() == [1, 5, 9]
    assert settled.scores is other.scores
    assert settled.indices.dtype == torch.int64
    assert memory.settle(replace(spec, query_ids=(3,)), other) is other
    memory.clear()
    assert memory.settle(spec, other) is other


def test_what_has_no_key_or_was_merged_is_not_remembered() -> None:
    memory = SelectionMemory()
    plain = Selection(torch.tensor([1]))
    merged = Selection(torch.tensor([1]), embeddings=torch.zeros(1, 16))
    memory.settle(spec_of(0), plain)
    memory.settle(spec_of(1), merged)
    assert len(memory) == 0

"""The workers' store of explanations: bounded whatever clients do."""

from __future__ import annotations

import torch

from msdg_vllm.engine.worker.explanations import ExplanationStore, TileExplanation, picture_of

TILE_BYTES = 8 * 2


class Clock:
    """Time that passes when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def tile(item: int = 0, number: int = 0, kept: int = 2) -> TileExplanation:
    return TileExplanation(item, number, (2, 3), torch.arange(kept))


def test_tiles_come_back_in_order_whenever_they_came() -> None:
    store = ExplanationStore()
    for item, number in ((1, 0), (0, 1), (2, 0), (0, 0)):
        store.keep(7, tile(item, number))
    tiles = store.get(7)
    assert tiles is not None
    assert [(t["index"], t["tile"]) for t in tiles] == [(0, 0), (0, 1), (1, 0), (2, 0)]


def test_an_image_that_is_encoded_again_takes_no_more_room() -> None:
    store = ExplanationStore()
    for _ in range(3):
        store.keep(7, tile())
    assert store.num_bytes == TILE_BYTES
    assert len(store.get(7) or ()) == 1


def test_the_oldest_requests_make_room_for_new_ones() -> None:
    store = ExplanationStore(max_requests=3)
    for key in range(1, 6):
        store.keep(key, tile())
    assert [key for key in range(1, 6) if store.get(key)] == [3, 4, 5]
    assert store.num_bytes == 3 * TILE_BYTES


def test_bytes_are_bounded() -> None:
    store = ExplanationStore(max_bytes=5 * TILE_BYTES)
    for key in range(1, 100):
        store.keep(key, tile(kept=4))
        assert store.num_bytes <= 5 * TILE_BYTES
    assert len(store) == 2
    store.keep(100, tile(kept=1000))
    assert store.get(100) is None
    assert len(store) == 2


def test_explanations_expire() -> None:
    clock = Clock()
    store = ExplanationStore(lifetime=10, clock=clock)
    store.keep(1, tile())
    clock.now = 6
    store.keep(2, tile())
    clock.now = 11
    assert store.get(1) is None
    assert store.get(2) is not None
    clock.now = 17
    assert store.get(2) is None
    assert (len(store), store.num_bytes) == (0, 0)


def test_values_that_json_does_not_know_are_replaced() -> None:
    scores = torch.tensor([float("nan"), float("inf"), 1.0])
    stored = TileExplanation(0, 0, (1, 3), torch.tensor([2]), scores=scores)
    values = stored.to_dict(with_picture=False)["scores"]
    assert values[0] == 0
    assert values[1] < float("inf")


def test_a_picture_undoes_the_normalisation() -> None:
    mean, std = (0.48, 0.45, 0.41), (0.27, 0.26, 0.28)
    original = torch.randint(0, 256, (3, 30, 20), dtype=torch.uint8)
    statistics = [torch.tensor(values).view(3, 1, 1) for values in (mean, std)]
    normalised = (original / 255 - statistics[0]) / statistics[1]
    assert torch.equal(picture_of(normalised, mean, std), original.permute(1, 2, 0))
    assert torch.equal(picture_of(original, mean, std), original.permute(1, 2, 0))


def test_a_large_picture_is_kept_small() -> None:
    height, width, _ = picture_of(torch.zeros(3, 3000, 1000), None, None).shape
    assert max(height, width) <= 448
    assert abs(height / width - 3) < 0.05

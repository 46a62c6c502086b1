"""Host memory by key: exact copies, a hard bound, the least recently used out first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msdg_vllm.engine.worker.host_store import HostStore

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Pair:
    left: torch.Tensor
    right: torch.Tensor

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Pair:
        return Pair(function(self.left), function(self.right))


def pair(number: int, size: int = 64) -> Pair:
    """A value of twice `size` bytes."""
    left = torch.full((size // 4,), number, dtype=torch.int32)
    return Pair(left, torch.full((size // 2,), -number, dtype=torch.bfloat16))


def assert_equal(found: Pair | None, expected: Pair) -> None:
    assert found is not None
    assert torch.equal(found.left, expected.left)
    assert torch.equal(found.right, expected.right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5, 7), (0,)])
def test_what_comes_out_is_what_went_in(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    store: HostStore[Pair] = HostStore(4096)
    value = Pair(torch.randn(shape).to(dtype), torch.randn(5).to(dtype))
    store.put("key", value)
    found = store.get("key", HOST)
    assert_equal(found, value)
    assert found is not None
    assert found.left.dtype == dtype
    assert found.left.shape == shape


def test_the_least_recently_used_makes_room() -> None:
    store: HostStore[Pair] = HostStore(3 * 128)
    for number in range(3):
        store.put(number, pair(number))
    store.get(0, HOST)
    store.put(3, pair(3))
    assert [store.peek(number) is not None for number in range(4)] == [True, False, True, True]
    assert store.evictions == 1


def test_what_came_out_stays_when_its_place_is_taken() -> None:
    store: HostStore[Pair] = HostStore(128)
    store.put("old", pair(1))
    found = store.get("old", HOST)
    store.put("new", pair(2))
    assert_equal(found, pair(1))
    assert store.get("old", HOST) is None


def test_a_value_that_can_never_fit_costs_nobody_a_place() -> None:
    store: HostStore[Pair] = HostStore(256)
    store.put("small", pair(1))
    store.put("large", pair(2, size=256))
    assert store.get("large", HOST) is None
    assert_equal(store.get("small", HOST), pair(1))


def test_a_key_that_comes_again_has_its_new_value() -> None:
    store: HostStore[Pair] = HostStore(1024)
    store.put("key", pair(1))
    store.put("key", pair(2, size=128))
    assert_equal(store.get("key", HOST), pair(2, size=128))
    assert (len(store), store.num_bytes) == (1, 256)


def test_the_number_of_entries_is_bounded_too() -> None:
    store: HostStore[Pair] = HostStore(2**16, max_entries=2)
    for number in range(3):
        store.put(number, pair(number))
    assert [store.peek(number) is not None for number in range(3)] == [False, True, True]


@given(
    st.lists(st.tuples(st.sampled_from("gp"), st.integers(0, 9), st.integers(1, 12)), max_size=120)
)
def test_memory_is_bounded_and_contents_are_right_whatever_comes(
    calls: list[tuple[str, int, int]],
) -> None:
    # Odd sizes leave holes; the bound is no multiple of any of them.
    store: HostStore[Pair] = HostStore(2000)
    twin: HostStore[Pair] = HostStore(2000)
    known: OrderedDict[int, Pair] = OrderedDict()
    for call, key, size in calls:
        if call == "p":
            known[key] = pair(key * 100 + size, size=size * 32)
            known.move_to_end(key)
        for one in (store, twin):
            if call == "p":
                one.put(key, known[key])
            elif (found := one.get(key, HOST)) is not None:
                known.move_to_end(key)
                assert_equal(found, known[key])
        held = [key for key in known if store.peek(key) is not None]
        # Whoever was used last is there: room is made from the other end.
        if call == "p" and size * 64 <= 2000:
            assert held[-1] == key
        assert store.num_bytes <= 2000
        assert [twin.peek(key) is not None for key in range(10)] == [
            store.peek(key) is not None for key in range(10)
        ]


def test_clearing_forgets_everything_and_leaves_all_of_the_room() -> None:
    store: HostStore[Pair] = HostStore(256)
    for number in range(5):
        store.put(number, pair(number, size=64))
    store.clear()
    assert (len(store), store.num_bytes) == (0, 0)
    store.put("all", pair(9, size=128))
    assert_equal(store.get("all", HOST), pair(9, size=128))


def test_the_memory_is_the_hosts_also_where_a_model_is_built_on_a_device() -> None:
    with torch.device("meta"):
        store: HostStore[Pair] = HostStore(1024)
    store.put("key", pair(1))
    assert_equal(store.get("key", HOST), pair(1))

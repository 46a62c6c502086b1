"""What an image carries to the worker arrives as it was sent."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msdg_vllm.engine.spec import UNPRUNED, PruningSpec
from msdg_vllm.request import METHODS, SCOPES

specs = st.builds(
    PruningSpec,
    budget=st.integers(1, 10_000),
    num_tokens=st.integers(1, 10_000),
    query_ids=st.lists(st.integers(0, 200_000), max_size=30).map(tuple),
    method=st.sampled_from(METHODS),
    scope=st.sampled_from(SCOPES),
    seed=st.integers(0, 2**63 - 1),
    explanation=st.integers(0, 2**63 - 1),
    content=st.integers(0, 2**126 - 1),
)


@given(specs)
def test_spec_survives_the_way_to_the_worker(spec: PruningSpec) -> None:
    assert PruningSpec.from_tensor(spec.to_tensor()) == spec


def test_unpruned_survives_the_way_to_the_worker() -> None:
    assert PruningSpec.from_tensor(UNPRUNED.to_tensor()) == UNPRUNED


@pytest.mark.parametrize(
    "change",
    [
        {"budget": 63},
        {"num_tokens": 577},
        {"query_ids": (5, 6)},
        {"scope": "image"},
        {"method": "random"},
        {"explanation": 1},
    ],
)
def test_specs_that_differ_have_other_identities(change: dict[str, object]) -> None:
    spec = PruningSpec(budget=64, num_tokens=576, query_ids=(5,))
    assert dataclasses.replace(spec, **change).identity() != spec.identity()  # type: ignore[arg-type]


def test_what_caches_call_an_image_does_not_depend_on_the_key_of_its_content() -> None:
    # One that comes as a name alone has no key, and must be found all the same.
    spec = PruningSpec(budget=64, num_tokens=576, query_ids=(5,))
    assert dataclasses.replace(spec, content=7).identity() == spec.identity()


@pytest.mark.parametrize(
    "change",
    [
        {"budget": 63},
        {"query_ids": (5, 6)},
        {"scope": "image"},
        {"method": "random"},
        {"content": 8},
    ],
)
def test_a_selection_is_remembered_for_its_own_question_and_image(
    change: dict[str, object],
) -> None:
    spec = PruningSpec(budget=64, num_tokens=576, query_ids=(5,), content=7)
    other = dataclasses.replace(spec, **change)  # type: ignore[arg-type]
    assert other.selection_identity() != spec.selection_identity()


def test_a_selection_is_remembered_whether_it_is_explained_or_not() -> None:
    spec = PruningSpec(budget=64, num_tokens=576, content=7)
    explained = dataclasses.replace(spec, explanation=3, item=1)
    assert explained.selection_identity() == spec.selection_identity()

"""Every index agrees with the literal float64 reference on thousands of random images."""

from collections import Counter
from dataclasses import dataclass

import pytest

from msdg_vllm.core import analyze_image, select_tokens
from tests.reference import Selection
from tests.unit.core.cases import Case, random_case

NUM_CASES = 2_000


@dataclass(frozen=True)
class Comparison:
    """What the core and the reference made of one case."""

    seed: int
    case: Case
    keep: list[int]
    groups: list[int]
    expected: Selection

    @property
    def is_clear(self) -> bool:
        """All decisions of the reference were farther from a tie than float32 noise."""
        return self.expected.margin > 1


def compare(seed: int) -> Comparison:
    """Run one random case through the core and through the reference."""
    case = random_case(seed)
    signals = analyze_image(case.states, case.profile, case.patches_per_token, valid=case.valid)
    keep = select_tokens(signals, case.visual, case.query, case.budget)
    return Comparison(seed, case, keep.tolist(), signals.groups.tolist(), case.solve())


@pytest.fixture(scope="module")
def comparisons() -> list[Comparison]:
    """All cases, solved twice."""
    return [compare(seed) for seed in range(NUM_CASES)]


def test_the_kept_tokens_are_those_of_the_reference(comparisons: list[Comparison]) -> None:
    wrong = [c.seed for c in comparisons if c.is_clear and c.keep != c.expected.keep]
    assert wrong == []


def test_the_groups_are_those_of_the_reference(comparisons: list[Comparison]) -> None:
    wrong = [c.seed for c in comparisons if c.is_clear and c.groups != c.expected.groups]
    assert wrong == []


def test_fewer_than_one_case_in_a_hundred_is_too_close_to_call(
    comparisons: list[Comparison],
) -> None:
    close = [c.seed for c in comparisons if not c.is_clear]
    print(f"{len(close)} of {len(comparisons)} cases too close for float32: {close}")
    assert len(close) < len(comparisons) / 100


def test_the_cases_reach_every_corner(comparisons: list[Comparison]) -> None:
    reached: Counter[str] = Counter()
    for c in comparisons:
        num_tokens, num_candidates = len(c.groups), len(c.expected.candidates)
        reached.update({f"stopped by {c.expected.stopped_by}": 1})
        reached.update(
            name
            for name, holds in {
                "one token": num_tokens == 1,
                "2880 tokens": num_tokens == 2880,
                "sinks": bool(c.expected.sinks),
                "no sinks": not c.expected.sinks,
                "nothing but sinks": num_candidates == 0,
                "budget beyond the candidates": c.case.budget > num_candidates,
                "more groups than candidates": c.case.profile.num_groups > num_candidates,
                "one group": c.case.profile.num_groups == 1,
                "40 groups": c.case.profile.num_groups == 40,
                "empty groups reseeded": c.expected.num_reseeded > 0,
                "copies": len({row.numpy().tobytes() for row in c.case.visual}) < num_tokens,
                "no query": len(c.case.query) == 0,
                "negative relevance": any(a < 0 for a in c.expected.relevance),
                "padding": c.case.valid is not None,
                "merged patches": c.case.patches_per_token == 4,
                "everything kept": c.case.budget == num_tokens,
            }.items()
            if holds
        )
    missing = {
        "stopped by labels", "stopped by loss", "stopped by limit",
        "one token", "2880 tokens", "sinks", "no sinks", "nothing but sinks",
        "budget beyond the candidates", "more groups than candidates", "one group", "40 groups",
        "empty groups reseeded", "copies", "no query", "negative relevance", "padding",
        "merged patches", "everything kept",
    } - reached.keys()  # fmt: skip
    assert missing == set(), reached

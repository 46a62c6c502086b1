"""A column's score comes out of lmms-eval's results in the paper's unit."""

import pytest

from benchmarks.paper.columns import BENCHMARKS
from benchmarks.paper.errors import EvaluationError


def test_an_accuracy_is_in_percent() -> None:
    assert BENCHMARKS["GQA"].score({"gqa": {"exact_match,none": 0.619}}) == pytest.approx(61.9)


def test_mme_is_perception_plus_cognition() -> None:
    results = {"mme": {"mme_perception_score,none": 1510.5, "mme_cognition_score,none": 351.5}}
    assert BENCHMARKS["MME"].score(results) == pytest.approx(1862)


def test_pope_is_the_mean_f1_of_its_three_settings() -> None:
    scores = {"pope_adv": 0.84, "pope_pop": 0.86, "pope_random": 0.88}
    results = {task: {"pope_f1_score,none": f1} for task, f1 in scores.items()}
    assert BENCHMARKS["POPE"].score(results) == pytest.approx(86.0)


@pytest.mark.parametrize("value", [None, "N/A", []])
def test_a_metric_without_a_number_is_refused_with_what_there_is(value: object) -> None:
    results = {"gqa": {"exact_match,none": value, "alias": "gqa"}}
    with pytest.raises(EvaluationError, match=r"no number for exact_match of gqa.*'alias'"):
        BENCHMARKS["GQA"].score(results)

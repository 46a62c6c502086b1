"""What lmms-eval leaves behind becomes a result, or an error that says why not."""

import json
from pathlib import Path

import pytest

from benchmarks.paper.columns import BENCHMARKS
from benchmarks.paper.errors import EvaluationError
from benchmarks.paper.evaluation import Evaluator, read_outcome

GQA = BENCHMARKS["GQA"]


def leave_behind(folder: Path, answers: list[str], log: str = "") -> None:
    """Write the files of a run of lmms-eval 0.7.3, as far as they are read."""
    (folder / "lmms-eval.log").write_text(log)
    if answers:
        written = folder / "some__model"
        written.mkdir()
        results = {"results": {"gqa": {"alias": "gqa", "exact_match,none": 0.5}}}
        (written / "20260101_000000_results.json").write_text(json.dumps(results))
        samples = [
            {"doc_id": number, "filtered_resps": answer, "token_counts": [{"input_tokens": tokens}]}
            for number, (answer, tokens) in enumerate(zip(answers, (100, 120, 110), strict=False))
        ]
        lines = "".join(json.dumps(sample) + "\n" for sample in samples)
        (written / "20260101_000000_samples_gqa.jsonl").write_text(lines)


def test_a_run_gives_score_questions_and_mean_prompt_tokens(tmp_path: Path) -> None:
    leave_behind(tmp_path, ["yes", "no"])
    outcome = read_outcome(GQA, tmp_path)
    assert (outcome.score, outcome.num_questions, outcome.prompt_tokens) == (50.0, 2, 110.0)


def test_a_request_without_an_answer_is_not_counted_as_a_wrong_one(tmp_path: Path) -> None:
    failed = "[LMMS_EVAL_REQUEST_FAILED after 5 retries] Error code: 400"
    leave_behind(tmp_path, ["yes", failed, "no"])
    with pytest.raises(EvaluationError, match=r"1 of 3 requests got no answer.*Error code: 400"):
        read_outcome(GQA, tmp_path)


def test_a_run_that_broke_names_its_cause(tmp_path: Path) -> None:
    log = "INFO\nTraceback\nValueError: no such metric\n"
    leave_behind(tmp_path, [], log)
    with pytest.raises(EvaluationError, match="no result for gqa: ValueError: no such metric"):
        read_outcome(GQA, tmp_path)


@pytest.mark.parametrize(
    "cause",
    [
        "ConnectionError: Couldn't reach 'some/GQA' on the Hub (LocalEntryNotFoundError)",
        "huggingface_hub.errors.LocalTokenNotFoundError: Token is required",
    ],
)
def test_a_data_set_that_does_not_come_is_told_from_other_failures(
    tmp_path: Path, cause: str
) -> None:
    log = f"Traceback\n{cause}\n\nTraceback\ntenacity.RetryError: RetryError[<Future ...>]\n"
    leave_behind(tmp_path, [], log)
    with pytest.raises(EvaluationError) as caught:
        read_outcome(GQA, tmp_path)
    assert "data set of gqa cannot be downloaded" in str(caught.value)
    assert cause in str(caught.value)


def test_an_interpreter_that_is_not_there_is_named_with_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"none/python.*pip install --group paper"):
        Evaluator.of(tmp_path / "none" / "python")


def test_an_interpreter_without_lmms_eval_is_named_with_how_to_get_it(tmp_path: Path) -> None:
    # A bare interpreter: isolated from every package but the standard library.
    bare = tmp_path / "python"
    bare.write_text('#!/bin/sh\nexec python3 -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(EvaluationError, match=r"has no lmms-eval.*pip install --group paper"):
        Evaluator.of(bare)

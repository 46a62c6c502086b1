"""In Triton's interpreter the kernels choose what the torch code and the reference choose."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

NUM_CASES = 520
ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What `interpreted.py` found."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.unit.core.kernels.interpreted", str(NUM_CASES)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    assert len(found["cases"]) == NUM_CASES
    return found


@pytest.mark.parametrize("what", ["keep", "groups", "keep as torch", "groups as torch"])
def test_every_index_agrees_where_margins_exceed_rounding(
    interpreted: dict[str, Any], what: str
) -> None:
    wrong = [c["seed"] for c in interpreted["cases"] if c["margin"] > 1 and not c[what]]
    assert wrong == []


@pytest.mark.parametrize("what", ["values as torch", "sinks as torch", "num_groups as torch"])
def test_signals_and_scores_agree_with_the_torch_code(
    interpreted: dict[str, Any], what: str
) -> None:
    assert [c["seed"] for c in interpreted["cases"] if not c[what]] == []


def test_fewer_than_two_cases_in_a_hundred_are_too_close_to_call(
    interpreted: dict[str, Any],
) -> None:
    close = [c["seed"] for c in interpreted["cases"] if c["margin"] <= 1]
    assert len(close) < NUM_CASES / 50


def test_the_cases_reach_every_corner(interpreted: dict[str, Any]) -> None:
    reached = Counter(corner for c in interpreted["cases"] for corner in c["corners"])
    missing = {
        "torch.float32", "torch.bfloat16", "torch.float16", "by a matrix", "by blocks",
        "stopped by labels", "stopped by limit", "sinks", "nothing but sinks",
        "budget beyond the candidates", "more groups than candidates", "empty groups reseeded",
        "empty groups reseeded by blocks", "copies", "no query", "padding", "merged patches",
        "not finite", "over 160 tokens",
    } - reached.keys()  # fmt: skip
    assert missing == set(), reached


def test_an_images_bits_do_not_depend_on_its_batch(interpreted: dict[str, Any]) -> None:
    assert [name for name, holds in interpreted["batches"].items() if not holds] == []


def test_the_greedy_methods_choose_the_same_tokens_in_one_launch(
    interpreted: dict[str, Any],
) -> None:
    # Four methods on 12 images each, two ways; on three of them by several programs too.
    assert len(interpreted["rivals"]) == 4 * (12 * 2 + 3) + 1
    assert [name for name, holds in interpreted["rivals"].items() if not holds] == []

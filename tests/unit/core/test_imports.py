"""The core stands on torch alone."""

import subprocess
import sys

import msdg_vllm.core


def test_the_core_loads_neither_vllm_nor_transformers() -> None:
    code = (
        "import sys, msdg_vllm.core, msdg_vllm.core.profiles; "
        "print(sorted({'vllm', 'transformers', 'pydantic'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_public_names_are_these() -> None:
    assert sorted(msdg_vllm.core.__all__) == [
        "ImageSignals",
        "SelectionOptions",
        "TokenScores",
        "analyze_image",
        "num_kept_tokens",
        "prune_image",
        "score_tokens",
        "select_tokens",
        "take_tokens",
        "validate_retention",
    ]

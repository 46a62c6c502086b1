"""Requests to Mini-Gemini in the format its chat template writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msdg_vllm.core.profiles import EncoderProfile
from tests.engine.generation import Request, processor_kwargs

QUESTIONS = ("What is on the left of the red square?", "Read the code on the sign.")
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)


def prompt_of(question: str, num_images: int = 1) -> str:
    return f"{SYSTEM} USER: " + "<image>\n" * num_images + f"{question} ASSISTANT:"


def ask(question: str, *images: Any, **kwargs: Any) -> Request:
    return {
        "prompt": prompt_of(question, len(images)),
        "multi_modal_data": {"image": list(images)},
        "mm_processor_kwargs": processor_kwargs(kwargs),
    }


def profile_in(folder: Path) -> EncoderProfile:
    return EncoderProfile.load(folder / "msdg_profile.json")

"""Requests to Qwen models in the chat format of the tiny checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.engine.generation import Request, processor_kwargs
from tests.engine.qwen_oracle import FRAMES_PER_SECOND
from tests.pictures import make_picture

QUESTIONS = ("Is there a blue circle in the picture?", "Read the code on the sign.")


def ask(question: str, *contents: Any, **wishes: Any) -> Request:
    """A user turn with images and videos and a question, in the checkpoint's chat format."""
    data: dict[str, list[Any]] = {}
    for content in contents:
        if isinstance(content, np.ndarray):
            data.setdefault("video", []).append((content, video_metadata(content)))
        else:
            data.setdefault("image", []).append(content)
    return {
        "prompt": prompt_of(question, *contents),
        "multi_modal_data": data,
        "mm_processor_kwargs": processor_kwargs(wishes),
    }


def prompt_of(question: str, *contents: Any, before: str = "") -> str:
    pads = [
        f"<|vision_start|><|{'video' if isinstance(c, np.ndarray) else 'image'}_pad|><|vision_end|>"
        for c in contents
    ]
    turn = f"<|im_start|>user\n{before}{''.join(pads)}{question}<|im_end|>\n"
    return f"{turn}<|im_start|>assistant\n"


def video_metadata(frames: np.ndarray) -> dict[str, Any]:
    return {
        "fps": FRAMES_PER_SECOND,
        "duration": len(frames) / FRAMES_PER_SECOND,
        "total_num_frames": len(frames),
        "frames_indices": list(range(len(frames))),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }


def make_video(num_frames: int, seed: int, width: int = 196, height: int = 140) -> np.ndarray:
    """A picture that moves."""
    picture = np.asarray(make_picture(width, height, seed))
    return np.stack([np.roll(picture, 9 * frame, axis=1) for frame in range(num_frames)])


def forget(llm: Any) -> None:
    """Empty every cache of the engine."""
    assert llm.reset_prefix_cache()
    llm.reset_mm_cache()
    llm.llm_engine.engine_core.reset_encoder_cache()

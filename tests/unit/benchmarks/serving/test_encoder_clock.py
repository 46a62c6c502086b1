"""The clock around a worker's vision encoder."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.serving.encoder_clock import EncoderClock


class Model:
    def embed_multimodal(self, **kwargs: Any) -> list[str]:
        time.sleep(kwargs["seconds"])
        return ["embedding"]


@pytest.fixture
def worker() -> EncoderClock:
    model = Model()
    clock = EncoderClock()
    clock.model_runner = SimpleNamespace(model=model, get_model=lambda: model)
    clock.start_encoder_clock()
    return clock


def test_every_call_is_timed_and_answers_as_before(worker: EncoderClock) -> None:
    for seconds in (0.05, 0.1):
        embeddings = worker.model_runner.model.embed_multimodal(seconds=seconds)
        assert embeddings == ["embedding"]
    first, second = worker.read_encoder_clock()
    assert first >= 0.05
    assert second >= 0.1


def test_reading_starts_anew(worker: EncoderClock) -> None:
    worker.model_runner.model.embed_multimodal(seconds=0)
    assert len(worker.read_encoder_clock()) == 1
    assert worker.read_encoder_clock() == []

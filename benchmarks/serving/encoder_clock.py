"""A clock around a worker's vision encoder, the same one in our server and in stock vLLM.

vLLM loads it by `--worker-extension-cls benchmarks.serving.encoder_clock.EncoderClock` and offers
its methods at `/collective_rpc` of a server with VLLM_SERVER_DEV_MODE=1.
"""

import time
from typing import Any

import torch


class EncoderClock:
    """Base class that vLLM adds to its worker."""

    model_runner: Any

    def start_encoder_clock(self) -> None:
        """Time every call of the model's `embed_multimodal` from now on.

        A GPU is waited for before and after, which costs stock vLLM and ours the same.
        """
        model = self.model_runner.get_model()
        embed = model.embed_multimodal
        self._encoder_seconds: list[float] = []

        def timed(**kwargs: Any) -> Any:
            _wait_for_device()
            start = time.perf_counter()
            embeddings = embed(**kwargs)
            _wait_for_device()
            self._encoder_seconds.append(time.perf_counter() - start)
            return embeddings

        model.embed_multimodal = timed

    def read_encoder_clock(self) -> list[float]:
        """Return the seconds of each call since the last reading, oldest first."""
        seconds, self._encoder_seconds = self._encoder_seconds, []
        return seconds


def _wait_for_device() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()

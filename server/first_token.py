"""How long requests with images wait for their first token, by how much of the images they keep.

vLLM measures the time but cannot know the retention; here both meet, for every route.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.outputs import RequestOutput

from server.metrics import RequestMetrics
from server.visual_tokens import VisualTokens


def install(engine_client: EngineClient, metrics: RequestMetrics) -> None:
    """Watch the outputs of every request with images that this API process sends to the engine."""
    stock = engine_client.generate

    def generate(prompt: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        outputs = stock(prompt, *args, **kwargs)
        tokens = VisualTokens.of_input(prompt) if isinstance(prompt, Mapping) else VisualTokens()
        return _watched(outputs, tokens, metrics) if tokens.items else outputs

    engine_client.generate = generate  # type: ignore[method-assign]


async def _watched(
    outputs: AsyncGenerator[RequestOutput, None], tokens: VisualTokens, metrics: RequestMetrics
) -> AsyncGenerator[RequestOutput, None]:
    is_due = True
    async with aclosing(outputs):
        async for output in outputs:
            # There are no times under --disable-log-stats.
            if is_due and output.metrics is not None:
                is_due = False
                metrics.observe_first_token(tokens, output.metrics.first_token_latency)
            yield output

"""How long requests with images wait for their first token, by how much of the images they keep.

vLLM measures the time but cannot know the retention; here both meet, for every route.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.logger import init_logger
from vllm.outputs import RequestOutput

from msdg_vllm.engine.api.visual_tokens import VisualTokens
from msdg_vllm.settings import Settings
from server.metrics import RequestMetrics

logger = init_logger(f"vllm.{__name__}")


def install(engine_client: EngineClient, metrics: RequestMetrics) -> None:
    """Watch the outputs of every request with images that this API process sends to the engine."""
    stock = engine_client.generate
    is_logged = Settings.from_environment().log_pruning

    def generate(prompt: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        outputs = stock(prompt, *args, **kwargs)
        tokens = VisualTokens.of_input(prompt) if isinstance(prompt, Mapping) else VisualTokens()
        if not tokens.items:
            return outputs
        return _watched(outputs, tokens, metrics, is_logged and tokens.pruned_items > 0)

    engine_client.generate = generate  # type: ignore[method-assign]


async def _watched(
    outputs: AsyncGenerator[RequestOutput, None],
    tokens: VisualTokens,
    metrics: RequestMetrics,
    is_logged: bool,
) -> AsyncGenerator[RequestOutput, None]:
    is_due = True
    async with aclosing(outputs):
        async for output in outputs:
            if is_due:
                is_due = False
                # There are no times under --disable-log-stats.
                seconds = None if output.metrics is None else output.metrics.first_token_latency
                if seconds is not None:
                    metrics.observe_first_token(tokens, seconds)
                if is_logged:
                    logger.info(
                        "%s kept %d of %d visual tokens of %d image%s by %s, "
                        "first token after %s s",
                        output.request_id,
                        tokens.kept,
                        tokens.total,
                        tokens.items,
                        "" if tokens.items == 1 else "s",
                        ", ".join(tokens.methods),
                        "?" if seconds is None else f"{seconds:.3f}",
                    )
            yield output

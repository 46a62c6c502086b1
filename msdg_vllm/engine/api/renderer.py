"""vLLM's renderer, plus the turns of the conversation.

Fills a gap: multi-modal processors see token ids only, while the query is a matter of messages.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.renderers.hf import HfRenderer

from msdg_vllm.core.errors import RequestError
from msdg_vllm.engine.api.processor import TURNS, PruningProcessor
from msdg_vllm.engine.api.queries import turns_of_messages
from msdg_vllm.request import PruningRequest

logger = init_logger(f"vllm.{__name__}")

PLUGIN = "msdg"
_SERVER_MODULE = "vllm.entrypoints.launchers.api_server.entry"


class PruningRenderer(HfRenderer):
    """Hands the turns of a chat to a pruning processor, and refuses pruning to any other."""

    def __init__(self, config: VllmConfig, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        if isinstance(self.mm_processor, PruningProcessor):
            # Here rather than in a worker: the message is the last thing the operator reads.
            self.mm_processor.check_config(config)

    def warmup(self, chat_params: Any) -> None:
        super().warmup(chat_params)
        if _SERVER_MODULE in sys.modules and PLUGIN not in (envs.VLLM_PLUGINS or ()):
            logger.warning(
                "This server ignores `retention` and `pruning` in requests: msdg-vllm is "
                "installed, but vLLM loads its routes only when VLLM_PLUGINS names them. Start "
                "with `python -m server`, or set VLLM_PLUGINS=%s (and add your other plugins).",
                PLUGIN,
            )

    def render_messages(self, messages: Any, params: Any) -> Any:
        conversation, prompt = super().render_messages(messages, params)
        return conversation, self._with_turns(prompt, messages)

    async def render_messages_async(self, messages: Any, params: Any) -> Any:
        conversation, prompt = await super().render_messages_async(messages, params)
        return conversation, self._with_turns(prompt, messages)

    def _with_turns(self, prompt: Any, messages: Any) -> Any:
        if prompt.get("multi_modal_data"):
            prompt[TURNS] = turns_of_messages(messages)
        return prompt

    def _apply_prompt_extras(
        self, prompts: Sequence[Any], prompt_extras: dict[str, Any] | None
    ) -> None:
        # Extras replace `mm_processor_kwargs` as a whole, so the turns join them afterwards.
        super()._apply_prompt_extras(prompts, prompt_extras)
        for prompt in prompts:
            if (turns := prompt.pop(TURNS, None)) is not None:
                prompt["mm_processor_kwargs"] = {
                    **(prompt.get("mm_processor_kwargs") or {}),
                    TURNS: turns,
                }

    def _process_multimodal(
        self,
        prompt: list[int],
        mm_data: Any,
        mm_uuids: Any,
        mm_processor_kwargs: Mapping[str, object] | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        own = dict(mm_processor_kwargs or {})
        processor = self.get_mm_processor()
        if not isinstance(processor, PruningProcessor):
            own.pop(TURNS, None)
            if keys := PruningRequest.keys_in(own):
                raise RequestError(
                    f"{keys[0]} is not available for {type(processor).__name__}: this model "
                    "is served by stock vLLM; leave it out",
                    parameter=keys[0],
                )
        return super()._process_multimodal(prompt, mm_data, mm_uuids, own, *args, **kwargs)

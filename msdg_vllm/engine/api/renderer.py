"""vLLM's renderer, plus the turns of the conversation.

Fills a gap: multi-modal processors see token ids only, while the query is a matter of messages.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.multimodal.cache import LruKeyReplicatedSenderCache
from vllm.renderers.hf import HfRenderer

from msdg_vllm.core.errors import RequestError
from msdg_vllm.engine.api import delivery, images
from msdg_vllm.engine.api.processor import SALT, PruningProcessor
from msdg_vllm.engine.api.queries import turns_of_messages
from msdg_vllm.engine.guards import check_config
from msdg_vllm.request import PRUNING, RETENTION, PruningRequest, check_parts

logger = init_logger(f"vllm.{__name__}")

PLUGIN = "msdg"
_REQUEST = "msdg_request"  # where it waits on a prompt for the kwargs it will join
_SERVER_MODULE = "vllm.entrypoints.launchers.api_server.entry"


class PruningRenderer(HfRenderer):
    """Hands the turns of a chat to a pruning processor, and refuses pruning to any other."""

    def __init__(self, config: VllmConfig, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        images.install()
        if isinstance(self.mm_processor, PruningProcessor):
            # Here rather than in a worker: the message is the last thing the operator reads.
            check_config(config)
            _ = self.mm_processor.offer  # a profile or method that does not fit stops the start
            # Only now: the engine's modules import renderers themselves.
            from msdg_vllm.engine.api import visual_tokens

            visual_tokens.install()
        if type(self._mm_processor_cache) is LruKeyReplicatedSenderCache:
            delivery.install()
            self._mm_processor_cache = delivery.DeliverySenderCache(config.model_config)

    def warmup(self, chat_params: Any) -> None:
        super().warmup(chat_params)
        if _SERVER_MODULE in sys.modules and PLUGIN not in (envs.VLLM_PLUGINS or ()):
            logger.warning(
                "This server ignores `retention` and `pruning` in requests: msdg-vllm is "
                "installed, but vLLM loads its routes only when VLLM_PLUGINS names them. Start "
                "with `msdg-vllm serve` (or `python -m server`), or set VLLM_PLUGINS=%s (and add "
                "your other plugins).",
                PLUGIN,
            )

    def render_messages(self, messages: Any, params: Any) -> Any:
        check_parts(messages, "messages")  # over HTTP this was done where the body came in
        conversation, prompt = super().render_messages(messages, params)
        return conversation, self._with_request(prompt, messages, conversation, params)

    async def render_messages_async(self, messages: Any, params: Any) -> Any:
        conversation, prompt = await super().render_messages_async(messages, params)
        return conversation, self._with_request(prompt, messages, conversation, params)

    def _with_request(self, prompt: Any, messages: Any, conversation: Any, params: Any) -> Any:
        """Put what a chat asks of pruning, its turns included, on the prompt as one value."""
        if prompt.get("multi_modal_data"):
            request = PruningRequest.take_from(dict(params.mm_processor_kwargs or {}))
            joints = None
            # Else vLLM itself has joined the parts of each message to one string.
            if isinstance(self.mm_processor, PruningProcessor) and any(
                isinstance(message.get("content"), list) for message in conversation
            ):
                joints = self.mm_processor.turn_markers(params.chat_template).joints
            prompt[_REQUEST] = replace(request, turns=turns_of_messages(messages, joints))
        return prompt

    def _apply_prompt_extras(
        self, prompts: Sequence[Any], prompt_extras: dict[str, Any] | None
    ) -> None:
        # Extras replace `mm_processor_kwargs` as a whole, so ours join them afterwards.
        super()._apply_prompt_extras(prompts, prompt_extras)
        for prompt in prompts:
            if (request := prompt.pop(_REQUEST, None)) is not None:
                kwargs = dict(prompt.get("mm_processor_kwargs") or {})
                own = PruningRequest.take_from(kwargs)
                if request.is_default:
                    request = replace(own, turns=request.turns)
                prompt["mm_processor_kwargs"] = {**kwargs, PRUNING: request}

    def _process_tokens(self, prompt: Any, **kwargs: Any) -> Any:
        return super()._process_tokens(self._with_salt(prompt), **kwargs)

    async def _process_tokens_async(self, prompt: Any, **kwargs: Any) -> Any:
        return await super()._process_tokens_async(self._with_salt(prompt), **kwargs)

    def _with_salt(self, prompt: Any) -> Any:
        """Let the processor know whom a prompt shares what is kept of its images with."""
        salt = prompt.get("cache_salt")
        if (
            not salt
            or not prompt.get("multi_modal_data")
            or not isinstance(self.get_mm_processor(), PruningProcessor)
        ):
            return prompt
        kwargs = {**(prompt.get("mm_processor_kwargs") or {}), SALT: salt}
        return {**prompt, "mm_processor_kwargs": kwargs}

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
        if (
            not isinstance(processor, PruningProcessor)
            and not (request := PruningRequest.take_from(own)).is_default
        ):
            name = PRUNING if request.retention is None else RETENTION
            raise RequestError(
                f"{name} is not available for {type(processor).__name__}: this model is served "
                "by stock vLLM; leave it out",
                parameter=name,
            )
        return super()._process_multimodal(prompt, mm_data, mm_uuids, own, *args, **kwargs)

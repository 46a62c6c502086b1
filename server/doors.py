"""Chats that reach vLLM's handler by other doors: /invocations, /v1/messages, `run_batch`.

They come as stock requests. Here they become ours, so that they are pruned, counted and answered
like those of /v1/chat/completions.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from msdg_vllm.request import NAMES
from server.schemas import PruningChatRequest, PruningFields, PruningMessagesRequest


def install(chat_handler: Any, messages_handler: Any) -> None:
    """Put the doors into vLLM's handlers of chats and of messages, where there are such."""
    if chat_handler is not None:
        chat_handler.create_chat_completion = _adopting(chat_handler.create_chat_completion)
    if messages_handler is not None:
        messages_handler.to_chat_completion_request = _keeping_wishes(
            messages_handler.to_chat_completion_request
        )


def _adopting(create_chat_completion: Any) -> Any:
    @wraps(create_chat_completion)
    async def create(request: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(request, PruningFields):
            request = PruningChatRequest.adopt(request)
        return await create_chat_completion(request, *args, **kwargs)

    return create


def _keeping_wishes(to_chat_completion_request: Any) -> Any:
    @wraps(to_chat_completion_request)
    def convert(request: Any, *args: Any, **kwargs: Any) -> Any:
        chat = to_chat_completion_request(request, *args, **kwargs)
        if isinstance(request, PruningMessagesRequest):
            return request.become(chat)
        if isinstance(request, PruningFields):
            # Only to be counted: the fields ride along, and nobody takes it for a request.
            fields = request.model_dump(include={*NAMES}, exclude_none=True)
            for name, value in fields.items():
                setattr(chat, name, value)
        return chat

    return convert

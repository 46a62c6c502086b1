"""Requests that are refused before anybody works on them: too large, or not to be read.

vLLM and uvicorn would read a body of any size into memory, ask for a retry of one that wants more
answers than the queue has places, and answer a malformed one with a 500: its checks expect mappings
where a client may send anything, and Python's JSON parser gives up on deep nesting.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from traceback import walk_tb

from fastapi import FastAPI, HTTPException, Request
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler
from vllm.exceptions import VLLMValidationError

from msdg_vllm.engine.hooks import wrap

MB = 1_000_000
_SHAPE_ERRORS = (AttributeError, KeyError, IndexError)
# Reads the types of content parts, which may be null.
_READER = "_get_message_types"


def install(app: FastAPI, max_mb: int) -> None:
    """Answer bodies that are too large with a 413, malformed ones with a 400."""
    app.add_middleware(RequestSizeLimit, max_mb=max_mb)
    app.exception_handler(RecursionError)(_refuse_depth)
    for error in _SHAPE_ERRORS:
        app.exception_handler(error)(_refuse_shape)


class RequestSizeLimit:
    """Answers a body of more than `max_mb` megabytes with a 413, before it is read where it can."""

    def __init__(self, app: ASGIApp, max_mb: int) -> None:
        self.app = app
        self.max_bytes = max_mb * MB
        self.message = (
            f"the request is larger than the {max_mb} MB this server takes; send smaller images, "
            "or ask its operator for a higher --max-request-mb"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count what is read of it."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and int(announced) > self.max_bytes:
            # The client may still be sending: there is no telling where its next request starts.
            too_large = refusal(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self.message, {"Connection": "close"}
            )
            return await too_large(scope, receive, send)
        num_bytes = 0

        async def counting_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:  # only a body without a length comes this far
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self.message)
            return message

        return await self.app(scope, counting_receive, send)


def refuse_too_many_answers(engine_client: EngineClient) -> None:
    """Refuse for good what no retry can bring into the queue."""
    limit = engine_client.vllm_config.scheduler_config.max_num_queued_reqs

    def check_admission(
        stock: Callable[..., None], n: int = 1, request_id: str | None = None
    ) -> None:
        if limit is not None and n > limit:
            raise VLLMValidationError(
                f"the request asks for {n} answers at a time, and this server has places for "
                f"{limit}; ask for fewer",
                parameter="n",
            )
        stock(n, request_id)

    wrap(engine_client, "check_admission", check_admission)


async def _refuse_depth(_: Request, error: Exception) -> JSONResponse:
    return refusal(
        HTTPStatus.BAD_REQUEST, "the JSON of the request is nested too deeply; send a flatter one"
    )


async def _refuse_shape(request: Request, error: Exception) -> JSONResponse:
    if not _comes_from_protocol(error):
        answer: JSONResponse = await exception_handler(request, error)
        return answer
    return refusal(
        HTTPStatus.BAD_REQUEST,
        f"a field of the request has another shape than it should: {error}; compare the body "
        "with the description of this route",
    )


def _comes_from_protocol(error: Exception) -> bool:
    """Whether an error was raised while vLLM checked a body, or read the types of its parts."""
    *_, (last, _) = walk_tb(error.__traceback__)
    name = str(last.f_globals.get("__name__"))
    return name.startswith("vllm.entrypoints.") and (
        name.endswith(".protocol") or last.f_code.co_name == _READER
    )


def refusal(
    status: HTTPStatus, message: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    """Answer with an error in OpenAI's shape."""
    error = {"message": message, "type": status.phrase, "param": None, "code": status}
    return JSONResponse({"error": error}, status, headers=headers)

"""How large a request may be.

vLLM and uvicorn would read a body of any size into memory, and ask for a retry of one that wants
more answers than the queue has places.
"""

from __future__ import annotations

from http import HTTPStatus

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMValidationError

MB = 1_000_000


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
            return await self._refusal()(scope, receive, send)
        num_bytes = 0

        async def counting_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:  # only a body without a length comes this far
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self.message)
            return message

        return await self.app(scope, counting_receive, send)

    def _refusal(self) -> JSONResponse:
        status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        error = {"message": self.message, "type": status.phrase, "param": None, "code": status}
        # The client may still be sending: there is no telling where its next request starts.
        return JSONResponse({"error": error}, status, headers={"Connection": "close"})


def refuse_too_many_answers(engine_client: EngineClient) -> None:
    """Refuse for good what no retry can bring into the queue."""
    limit = engine_client.vllm_config.scheduler_config.max_num_queued_reqs
    stock = engine_client.check_admission

    def check_admission(n: int = 1, request_id: str | None = None) -> None:
        if limit is not None and n > limit:
            raise VLLMValidationError(
                f"the request asks for {n} answers at a time, and this server has places for "
                f"{limit}; ask for fewer",
                parameter="n",
            )
        stock(n, request_id)

    engine_client.check_admission = check_admission  # type: ignore[method-assign]

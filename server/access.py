"""Who may ask what, and what of it the log shows.

With an API key, every route asks for it but those of probes and scrapers. vLLM's own check covers
only paths such as /v1; /invocations, /tokenize and others would answer anyone.
"""

from __future__ import annotations

import logging
import re
from argparse import Namespace
from collections.abc import Awaitable

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from vllm import envs
from vllm.entrypoints.anthropic import api_router as anthropic
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from msdg_vllm.console import PROBE_PATHS
from server import playground

OPEN_PATHS = PROBE_PATHS | {playground.PATH}

_EXPLANATION_PATH = re.compile(r"(/v1/pruning/)[^/?\s]+")


class KeyOnEveryPath(AuthenticationMiddleware):
    """vLLM's check of the key, the other way round: what is not named is closed."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Let a request pass, or answer it with a 401."""
        is_request = scope["type"] in ("http", "websocket") and scope.get("method") != "OPTIONS"
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if is_request and not _is_open(path) and not self.verify_token(Headers(scope=scope)):
            return JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
        return self.app(scope, receive, send)


def _is_open(path: str) -> bool:
    # The page holds no secret; what it asks for, it asks with the key of the person before it.
    return path in OPEN_PATHS or path.startswith(f"{playground.PATH}/")


def hide_explanation_id(record: logging.LogRecord) -> bool:
    """Take the ids of explanations out of an access log record: they open pictures."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            _EXPLANATION_PATH.sub(r"\1...", argument) if isinstance(argument, str) else argument
            for argument in record.args
        )
    return True


def shorten_client_error(record: logging.LogRecord) -> bool:
    """Leave a client's mistake one line of the log: a traceback is for faults of the server."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, Exception) and create_error_response(error).error.code < 500:
        record.exc_info = None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
    return True


def install(app: FastAPI, args: Namespace) -> None:
    """Close `app` if the operator named a key, where vLLM looks for it; keep the log discreet."""
    logging.getLogger("uvicorn.access").addFilter(hide_explanation_id)
    logging.getLogger(anthropic.__name__).addFilter(shorten_client_error)
    if keys := [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]:
        app.add_middleware(KeyOnEveryPath, tokens=keys)

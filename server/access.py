"""Who may ask what: with an API key, every route asks for it but those of probes and scrapers.

vLLM's own check covers only paths such as /v1; /invocations, /tokenize and others would answer
anyone.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Awaitable

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from server import playground

OPEN_PATHS = frozenset({"/health", "/metrics", "/ping", playground.PATH})


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


def install(app: FastAPI, args: Namespace) -> None:
    """Close `app` if the operator named a key, where vLLM looks for it."""
    if keys := [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]:
        app.add_middleware(KeyOnEveryPath, tokens=keys)
